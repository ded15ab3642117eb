"""GGUF files: the same model as from safetensors, every quantisation, LLaMA 3.1's RoPE; damage is named in one line."""

import struct

import gguf
import jax
import numpy as np
import pytest
from conftest import DATA, PlainModel
from gguf import GGMLQuantizationType as Kind
from gguf_files import config_fields, gguf_name, interleaved, write_gguf

from mooncake_jax.errors import UsageError
from mooncake_jax.model.config import LlamaConfig, RopeDivisors
from mooncake_jax.model.gguf import GGUFSource
from mooncake_jax.model.gguf_header import read_header
from mooncake_jax.model.loading import load_model
from mooncake_jax.model.sources import inspect_model, open_source

WIDE = LlamaConfig(32, 256, 512, 1, 4, 2, 64, 10000.0, None, 1e-5, True, 128)
ALL = (slice(None), slice(None))


def tensors_of(folder):
    """A tiny model's tensors in GGUF's terms."""
    source = open_source(folder)
    tensors = {}
    for name, shape in source.shapes.items():
        data = source.read(name, (slice(None),) * len(shape))
        tensors[gguf_name(name)] = interleaved(data, 8) if ".q_proj" in name or ".k_proj" in name else data
    return tensors


def write_tiny(path, tensors=None, architecture="llama", texts=None, **changes):
    """tiny-llama2; changes: of metadata, None to drop."""
    fields = config_fields(open_source(DATA / "tiny-llama2").config()) | changes
    tensors = tensors_of(DATA / "tiny-llama2") if tensors is None else tensors
    return write_gguf(path, fields, tensors, architecture=architecture, texts=texts)


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def refused(complaint, path, work=lambda path: load_model(path, "float32")):
    with pytest.raises(UsageError, match=complaint) as caught:
        work(path)
    assert "\n" not in str(caught.value)


def test_gguf_and_safetensors_give_the_same_model(tiny_gguf, tiny2):
    model = load_model(tiny_gguf, "float32")
    assert model.config.rms_norm_eps == pytest.approx(1e-5)
    jax.tree.map(np.testing.assert_array_equal, (model.embedder, model.layers), (tiny2.embedder, tiny2.layers))
    ids = list(range(20))
    np.testing.assert_allclose(PlainModel(model).forward(ids)[0], PlainModel(tiny2).forward(ids)[0], atol=1e-5)
    assert model.tokenizer is None


def test_the_header_is_what_the_gguf_package_reads(tiny_gguf, tmp_path):
    texts = {"general.name": "é", "tokenizer.ggml.tokens": ["a", "ß", ""], "tokenizer.ggml.scores": [0.5, -1.0]}
    path = write_tiny(tmp_path / "t.gguf", texts=texts)
    header, reader = read_header(path), gguf.GGUFReader(path)
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert header.fields == theirs and theirs["tokenizer.ggml.tokens"] == texts["tokenizer.ggml.tokens"]
    assert header.tensors.keys() == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        info = header.tensors[tensor.name]
        assert (info.shape, info.offset) == (tuple(map(int, tensor.shape[::-1])), tensor.data_offset)
        assert info.rows * info.row_bytes == tensor.n_bytes


def quantised(kind, rows, columns, rng):
    """Bytes [rows, row_bytes] of random weights: by the package's quantiser, or of random bits with tame scales."""
    if kind not in (Kind.Q4_K, Kind.Q6_K):
        return gguf.quantize(rng.normal(size=(rows, columns)).astype(np.float32), kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows, columns // block, size), np.uint8)
    scale = np.frombuffer(struct.pack("<e", 0.01), np.uint8)
    for at in (0, 2) if kind == Kind.Q4_K else (size - 2,):
        blocks[..., at : at + 2] = scale
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K])
def test_every_quantisation_whole_and_by_slices(kind, tmp_path):
    rng, query, keys = np.random.default_rng(3), (256, 256), (128, 256)
    shapes = {"token_embd": (32, 256), "blk.0.attn_q": query, "blk.0.attn_output": query, "blk.0.attn_k": keys}
    shapes |= {"blk.0.attn_v": keys, "blk.0.ffn_down": (256, 512)}
    shapes |= {f"blk.0.ffn_{name}": (512, 256) for name in ("gate", "up")}
    stored = {f"{name}.weight": (quantised(kind, *shape, rng), kind) for name, shape in shapes.items()}
    norms = {
        f"{name}.weight": np.ones(256, np.float32) for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")
    }
    path = write_gguf(tmp_path / "q.gguf", config_fields(WIDE), stored | norms)
    values = {name: gguf.dequantize(data, kind) for name, (data, _) in stored.items()}
    model, source = load_model(path, "float32"), GGUFSource(path)
    assert model.config.tie_word_embeddings
    layer = model.layers[0]
    np.testing.assert_array_equal(layer["mlp"]["down"]["kernel"], values["blk.0.ffn_down.weight"].T)
    kernel = np.asarray(layer["attention"]["k"]["kernel"]).T
    np.testing.assert_array_equal(interleaved(kernel, 64), values["blk.0.attn_k.weight"])
    for name, index in {
        "model.layers.0.mlp.down_proj.weight": (slice(0, 256), slice(256, 512)),
        "model.layers.0.mlp.gate_proj.weight": (slice(100, 300), slice(33, 95)),
        "model.layers.0.self_attn.q_proj.weight": (slice(17, 101), slice(0, 256)),
    }.items():
        np.testing.assert_array_equal(source.read(name, index), source.read(name, ALL)[index])


def test_blocks_of_4_and_6_bits_mean_what_the_format_says(tmp_path):
    half = {x: np.frombuffer(struct.pack("<e", x), np.uint8) for x in (0.5, 0.25)}
    # Q4_K: d, dmin, 12 bytes of 6-bit scales and minima (each 1 here), 128 bytes of nibbles (low 3, high 5).
    scales = np.array([1] * 4 + [1] * 4 + [0x11] * 4, np.uint8)
    q4_k = np.concatenate([half[0.5], half[0.25], scales, np.full(128, 0x53, np.uint8)])
    expected = np.tile(np.repeat([0.5 * 3 - 0.25, 0.5 * 5 - 0.25], 32), 4)
    # Q6_K: 128 bytes of low nibbles (7), 64 of high bits (01 each), 16 scales (2), d: 0.5 * 2 * (7 + 16 - 32).
    q6_k = np.concatenate(
        [np.full(128, 0x77, np.uint8), np.full(64, 0x55, np.uint8), np.full(16, 2, np.uint8), half[0.5]]
    )
    for kind, block, values in ((Kind.Q4_K, q4_k, expected), (Kind.Q6_K, q6_k, np.full(256, -9.0))):
        tensors = {"token_embd.weight": (np.stack([block] * 2), kind)}
        source = GGUFSource(write_gguf(tmp_path / f"{kind.name}.gguf", config_fields(WIDE), tensors))
        np.testing.assert_array_equal(source.read("model.embed_tokens.weight", ALL), np.stack([values] * 2))


def test_a_quantisation_that_the_package_cannot_read_is_named(tmp_path):
    kind = Kind.Q8_K  # an intermediate type of llama.cpp's
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.zeros((2, 256 // block * size), np.uint8)
    path = write_gguf(tmp_path / "x.gguf", config_fields(WIDE), {"token_embd.weight": (data, kind)})
    name = "model.embed_tokens.weight"
    refused(f"{name} is quantised as Q8_K", path, lambda path: GGUFSource(path).read(name, ALL))


def test_llama31_rope_travels_as_divisors(tmp_path, tiny3):
    config = tiny3.config
    plain = config.rope_theta ** -(np.arange(0, 8, 2, dtype=np.float32) / 8)
    divisors = (plain / config.rope_frequencies()).astype(np.float32)
    assert divisors.max() > 2
    tensors = tensors_of(DATA / "tiny-llama3") | {"rope_freqs.weight": divisors}
    path = write_gguf(tmp_path / "l3.gguf", config_fields(config), tensors, theta=config.rope_theta)
    model = load_model(path, "float32")
    assert isinstance(model.config.rope_scaling, RopeDivisors)
    np.testing.assert_allclose(model.config.rope_frequencies(), config.rope_frequencies(), rtol=1e-6)
    golden = dict(np.load(DATA / "tiny-llama3" / "expected.npz"))
    np.testing.assert_allclose(PlainModel(model).forward(golden["input_ids"])[0], golden["logits"], atol=1e-4)


def test_linear_rope_and_rope_that_is_refused(tmp_path):
    plain, linear = open_source(DATA / "tiny-llama2").config(), {"llama.rope.scaling.type": "linear"}
    half = GGUFSource(write_tiny(tmp_path / "h.gguf", texts=linear | {"llama.rope.scaling.factor": 2.0})).config()
    np.testing.assert_array_equal(half.rope_frequencies(), plain.rope_frequencies() / 2)
    assert GGUFSource(write_tiny(tmp_path / "l.gguf", texts=linear)).config().rope_scaling is None  # a factor of 1
    refused("scaling 'yarn' over 8 of 8", write_tiny(tmp_path / "y.gguf", texts={"llama.rope.scaling.type": "yarn"}))
    refused("over 4 of 8 dimensions", write_tiny(tmp_path / "b.gguf", **{"rope.dimension_count": 4}))
    tensors = tensors_of(DATA / "tiny-llama2") | {"rope_freqs.weight": np.ones(3, np.float32)}
    refused("3 RoPE divisors for a head_dim of 8", write_tiny(tmp_path / "r.gguf", tensors))
    tensors["rope_freqs.weight"] = np.array([1, np.nan, 1, 1], np.float32)
    refused("RoPE divisors are .*nan", write_tiny(tmp_path / "n.gguf", tensors))


def test_a_gguf_cut_anywhere_is_refused(tiny_gguf, tmp_path):
    whole = tiny_gguf.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in (0, 3, 4, 7, 20, 25, 60, 301, 700, 2000, 4000, len(whole) // 2, len(whole) - 70000, len(whole) - 1):
        cut.write_bytes(whole[:size])
        refused("cut.gguf: not a whole GGUF file .*fetch it again", cut, inspect_model)


def test_a_damaged_header_gives_one_line_or_a_model(tiny_gguf, tmp_path):
    """Whatever byte of the metadata is wrong: no other exception, no endless loop."""
    whole, path = bytearray(tiny_gguf.read_bytes()), tmp_path / "damaged.gguf"
    for place in range(0, 2000, 13):
        damaged = bytearray(whole)
        damaged[place] ^= 0x55
        path.write_bytes(damaged)
        try:
            load_model(path, "float32")
        except UsageError as error:
            assert "\n" not in str(error)


def test_gguf_refusals(tmp_path):
    refused("none.gguf: no such GGUF file", tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("hello, this is no model at all, but long enough")
    refused("text.gguf: not a whole GGUF file", tmp_path / "text.gguf")
    refused("architecture 'qwen2'", write_tiny(tmp_path / "q.gguf", architecture="qwen2"))
    refused("block_count is None", write_tiny(tmp_path / "a.gguf", block_count=None))
    refused("tensors missing: model.layers.4.*and 6 more", write_tiny(tmp_path / "c.gguf", block_count=5))
    refused("asks for 2052 layers, of 39 tensors in all", write_tiny(tmp_path / "g.gguf", block_count=4 + (8 << 8)))
    refused("num_layers is 2147483652", write_tiny(tmp_path / "h.gguf", block_count=4 + (1 << 31)))
    refused("tensors unknown to a llama: model.layers.3", write_tiny(tmp_path / "d.gguf", block_count=3))
    refused(
        r"has shape \[.*176.*\], the config asks for \[.*177.*\]",
        write_tiny(tmp_path / "e.gguf", feed_forward_length=177),
    )
    refused("8 query heads cannot share 3 KV heads", write_tiny(tmp_path / "f.gguf", **{"attention.head_count_kv": 3}))


@pytest.mark.parametrize(
    "broken",
    [
        {"merges": None},
        {"token_type": None},
        {"token_type": [1, 2]},
        {"merges": ["no such pair"]},
        {"eos_token_id": 10**6},
        {"chat_template": "{% for message in messages %}"},
    ],
    ids=lambda broken: next(iter(broken)),
)
def test_a_broken_tokenizer_is_one_line_that_names_the_file(tmp_path, broken):
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.token_type": [1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 0,
    }
    for name, value in broken.items():
        key = f"tokenizer.{name}" if name == "chat_template" else f"tokenizer.ggml.{name}"
        if value is None:
            del fields[key]
        else:
            fields[key] = value
    source = GGUFSource(write_tiny(tmp_path / "f.gguf"))
    source._fields.update(fields)
    with pytest.raises(UsageError, match="f.gguf: its tokenizer cannot be rebuilt") as caught:
        source.tokenizer()
    assert len(str(caught.value).splitlines()) == 1
