"""Weight files: GGUF and safetensors give the same model; whatever is broken is named in one line."""

import json
import shutil
import subprocess
import sys

import gguf
import jax
import numpy as np
import pytest
from conftest import DATA, PlainModel
from safetensors.numpy import load_file, save_file

from mooncake_jax.errors import UsageError
from mooncake_jax.model.loading import load_model
from mooncake_jax.model.sources import inspect_model, model_fingerprint, open_source

TINY = DATA / "tiny-llama2"
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path, architecture="llama", **changes):
    """tiny-llama2 as llama.cpp writes it: other names, interleaved q and k rows. changes: of metadata, None to drop."""
    source = open_source(TINY)
    writer = gguf.GGUFWriter(path, architecture)
    fields = {
        "block_count": 4,
        "context_length": 2048,
        "embedding_length": 64,
        "feed_forward_length": 176,
        "attention.head_count": 8,
        "attention.head_count_kv": 2,
        "attention.key_length": 8,
        "rope.dimension_count": 8,
    }
    for key, value in (fields | changes).items():
        if value is not None:
            writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    for name in source.shapes:
        data, stem = source.read(name), name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            if stem in ("self_attn.q_proj", "self_attn.k_proj"):
                data = data.reshape(-1, 2, 4, 64).swapaxes(1, 2).reshape(data.shape)
            writer.add_tensor(f"blk.{layer}.{GGUF_NAMES[stem]}.weight", data)
        else:
            writer.add_tensor(f"{GGUF_NAMES[stem]}.weight", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def folder(tmp_path):
    """A copy of tiny-llama2 to break."""
    return shutil.copytree(TINY, tmp_path / "model")


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


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


def test_a_gguf_cut_anywhere_is_refused(tiny_gguf, tmp_path):
    whole = tiny_gguf.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in (0, 3, 4, 7, 20, 25, 60, 301, 700, 2000, 4000, len(whole) // 2, len(whole) - 70000, len(whole) - 1):
        cut.write_bytes(whole[:size])
        refused("cut.gguf: not a whole GGUF file .*fetch it again", cut, inspect_model)


def test_gguf_refusals(tiny_gguf, tmp_path):
    refused("none.gguf: no such GGUF file", tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("hello, this is no model at all, but long enough")
    refused("text.gguf: not a whole GGUF file", tmp_path / "text.gguf")
    refused("architecture 'qwen2'", write_gguf(tmp_path / "q.gguf", "qwen2"))
    refused("block_count is None", write_gguf(tmp_path / "a.gguf", block_count=None))
    refused("scaled or partial RoPE", write_gguf(tmp_path / "b.gguf", **{"rope.dimension_count": 4}))
    refused("tensors missing: model.layers.4.*and 6 more", write_gguf(tmp_path / "c.gguf", block_count=5))
    refused("tensors unknown to a llama: model.layers.3", write_gguf(tmp_path / "d.gguf", block_count=3))
    refused(
        r"has shape \[.*176.*\], the config asks for \[.*177.*\]",
        write_gguf(tmp_path / "e.gguf", feed_forward_length=177),
    )
    refused("8 query heads cannot share 3 KV heads", write_gguf(tmp_path / "f.gguf", **{"attention.head_count_kv": 3}))


def test_safetensors_refusals(folder):
    index, shard = folder / "model.safetensors.index.json", folder / "model-00003-of-00005.safetensors"
    edit(folder / "config.json", num_hidden_layers=5)
    refused("tensors missing: model.layers.4.input_layernorm.weight, .* and 6 more", folder)
    edit(folder / "config.json", num_hidden_layers=4, tie_word_embeddings=True)
    load_model(folder, "float32")  # a tied head's copy in the file is no fault
    edit(folder / "config.json", tie_word_embeddings=False, vocab_size=321)
    refused(r"embed_tokens.weight has shape \[320, 64\], the config asks for \[321, 64\]", folder)
    edit(folder / "config.json", vocab_size=320)
    shard.write_bytes(shard.read_bytes()[:-100])
    refused("00003-of-00005.safetensors: not a whole safetensors file", folder)
    shard.unlink()
    refused("00003-of-00005.safetensors: no such weight file", folder)
    index.write_text("{}")
    refused("index.json: no weight_map", folder)
    index.unlink()
    refused("model.safetensors: no such weight file", folder)
    (folder / "config.json").write_text("not json")
    refused("config.json: not JSON", folder)
    (folder / "config.json").unlink()
    refused("config.json: No such file", folder)


def test_an_unknown_dtype_is_refused(folder):
    refused(
        "dtype 'float16' is not known; use one of float32, bfloat16", folder, lambda path: load_model(path, "float16")
    )


def test_bfloat16_weights_are_read(folder, tiny2):

    for path in folder.glob("*.safetensors"):
        save_file({name: x.astype(jax.numpy.bfloat16) for name, x in load_file(path).items()}, path)
    stored, rounded = load_model(folder, "bfloat16"), load_model(TINY, "bfloat16")
    assert stored.layers[0]["mlp"]["up"]["kernel"].dtype == jax.numpy.bfloat16
    jax.tree.map(np.testing.assert_array_equal, stored.layers, rounded.layers)


def test_fingerprint_tells_weights_config_and_dtype_apart(folder):
    whole = model_fingerprint(TINY, "float32")
    assert whole == model_fingerprint(folder, "float32") == load_model(TINY, "float32").fingerprint
    assert len(whole) == 32
    found = {whole, model_fingerprint(TINY, "bfloat16")}
    edit(folder / "config.json", rope_parameters={"rope_theta": 20000.0, "rope_type": "default"})
    found.add(model_fingerprint(folder, "float32"))
    shutil.copy(TINY / "config.json", folder)
    shard = folder / "model-00002-of-00005.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    found.add(model_fingerprint(folder, "float32"))
    assert len(found) == 4


def test_inspecting_a_model_needs_no_jax():
    code = (
        "import sys, pathlib; from mooncake_jax.model import catalog; from mooncake_jax.model.sources import *; "
        f"path = pathlib.Path({str(TINY)!r}); inspect_model(path); model_fingerprint(path, 'float32'); "
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
