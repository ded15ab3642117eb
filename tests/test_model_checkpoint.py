"""Orbax checkpoints: a converted model is the model; whatever is broken is named, and nothing half-written is left."""

import hashlib
import json
import shutil
from dataclasses import replace

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from conftest import DATA

from mooncake_jax.errors import UsageError
from mooncake_jax.model.catalog import resolve
from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.model.conversion import convert_model
from mooncake_jax.model.dummy import DummyModel
from mooncake_jax.model.loading import load_model
from mooncake_jax.model.sources import inspect_model, model_fingerprint

TINY = DATA / "tiny-llama2"
SMALL = LlamaConfig(64, 32, 48, 3, 4, 2, 8, 10000.0, None, 1e-5, False, 128)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """tiny-llama2 as float32 checkpoints; not to be changed."""
    out = tmp_path_factory.mktemp("orbax") / "models" / "tiny"
    steps = []
    convert_model(TINY, out, "float32", lambda done, total: steps.append((done, total)))
    total = inspect_model(TINY)[0].parameters
    assert len(steps) == 5 and steps[-1] == (total, total) and steps == sorted(steps)
    return out


@pytest.fixture
def broken(tmp_path):
    """A checkpoint to break: an embedder and three layers."""
    out = tmp_path / "broken"
    convert_model(DummyModel(SMALL, 0), out, "bfloat16", lambda done, total: None)
    return out


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, (a.embedder, a.layers), (b.embedder, b.layers))


def test_the_folder_alone_is_the_model(converted, tiny2):
    assert resolve(str(converted)) == converted
    assert inspect_model(converted) == (tiny2.config, None)
    model = load_model(converted, "float32")
    same(model, tiny2)
    assert model.config == tiny2.config
    assert [path.name for path in converted.parent.iterdir()] == ["tiny"]


def test_it_loads_in_the_other_dtype(converted):
    same(load_model(converted, "bfloat16"), load_model(TINY, "bfloat16"))


def test_arrays_are_not_bound_to_a_device(converted, tiny2):
    """A committed array among uncommitted ones would make jitted functions compile twice."""
    leaves = jax.tree.leaves(load_model(converted, "float32").layers) + jax.tree.leaves(tiny2.layers)
    assert not any(leaf.committed for leaf in leaves)


def test_orbax_itself_restores_what_was_written(converted, tiny2):
    parts = {"embedder": tiny2.embedder} | {f"layer_{i:03d}": layer for i, layer in enumerate(tiny2.layers)}
    with ocp.StandardCheckpointer() as checkpointer:
        for name, expected in parts.items():
            jax.tree.map(np.testing.assert_array_equal, checkpointer.restore(converted / name), expected)


@pytest.mark.parametrize("vocab_size", [8190, 4099])
def test_arrays_of_many_blocks(tmp_path, vocab_size):
    """A prime size, which Orbax cannot cut but into single rows, and one that it can."""
    source = DummyModel(replace(SMALL, vocab_size=vocab_size, hidden_size=128), 0)
    convert_model(source, tmp_path / "m", "float32", lambda done, total: None)
    blocks = json.loads((tmp_path / "m" / "embedder" / "mooncake_checksums.json").read_text())
    assert all(2 < len(blocks[name]) < 20 for name in ("embedding", "head"))
    same(load_model(tmp_path / "m", "float32"), load_model(source, "float32"))


def test_fingerprints_tell_models_and_dtypes_apart(converted, tmp_path):
    prints = {model_fingerprint(converted, dtype) for dtype in ("float32", "bfloat16")}
    for name, source, dtype in (("a", TINY, "bfloat16"), ("b", DATA / "tiny-llama3", "float32")):
        convert_model(source, tmp_path / name, dtype, lambda done, total: None)
        prints.add(model_fingerprint(tmp_path / name, "float32"))
    assert len(prints) == 4
    convert_model(TINY, tmp_path / "again", "float32", lambda done, total: None)
    assert model_fingerprint(tmp_path / "again", "float32") in prints


def test_a_checkpoint_can_be_converted_again(converted, tmp_path):
    convert_model(converted, tmp_path / "half", "bfloat16", lambda done, total: None)
    same(load_model(tmp_path / "half", "bfloat16"), load_model(TINY, "bfloat16"))


def test_smollm2_keeps_its_tokenizer(smollm2_path, smollm2_cases, tmp_path):
    convert_model(smollm2_path, tmp_path / "smollm2", "bfloat16", lambda done, total: None)
    config, tokenizer = inspect_model(tmp_path / "smollm2")
    assert config == inspect_model(smollm2_path)[0]
    assert tokenizer.eos_ids == {0, 2}
    for case in smollm2_cases:
        if "messages" in case:
            assert tokenizer.chat(case["messages"]) == case["prompt"]
        assert tokenizer.encode(case["prompt"]) == case["prompt_ids"]
    same(load_model(tmp_path / "smollm2", "bfloat16"), load_model(smollm2_path, "bfloat16"))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        path = tmp_path / "smollm2" / name
        whole = path.read_bytes()
        for damage in (lambda path, whole=whole: path.write_bytes(whole + b"\n"), lambda path: path.unlink()):
            damage(path)
            with pytest.raises(UsageError, match=f"/{name}: not as it was written with the arrays"):
                inspect_model(tmp_path / "smollm2")
            path.write_bytes(whole)
    assert inspect_model(tmp_path / "smollm2")[0] == config


def test_nothing_is_overwritten(converted):
    with pytest.raises(UsageError, match="tiny: exists already; choose another --out") as caught:
        convert_model(TINY, converted, "float32", lambda done, total: None)
    assert "\n" not in str(caught.value)


def test_a_conversion_that_fails_leaves_nothing(tmp_path):
    def give_up(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_model(TINY, tmp_path / "models" / "m", "float32", give_up)
    assert list((tmp_path / "models").iterdir()) == []
    huge = DummyModel(replace(SMALL, vocab_size=10**15), 0)
    with pytest.raises(UsageError, match="the weights take .* GiB and its disk has .* left"):
        convert_model(huge, tmp_path / "models" / "m", "float32", give_up)
    assert list((tmp_path / "models").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        convert_model(TINY, tmp_path / "file" / "m", "float32", lambda done, total: None)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def forge(folder, **changes):
    """Changes config.json, and its digest with it."""
    edit(folder / "config.json", **changes)
    digest = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    edit(folder / "mooncake_checkpoint.json", files={"config.json": digest})


def cut_data(folder):
    for path in (folder / "layer_001").glob("**/d/*"):
        path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(folder):
    """In the middle of the largest file. TensorStore notices only the few that make it undecodable."""
    path = max((folder / "layer_001").glob("**/d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage, complaint",
    [
        (
            lambda f: edit(f / "config.json", num_hidden_layers=2),
            "/config.json: not as it was written with the arrays; c",
        ),
        (lambda f: edit(f / "config.json", rope_theta=2e4), "/config.json: not as it was written with the arrays; c"),
        (lambda f: forge(f, num_hidden_layers=2), "layer_002: not of this model, which has 2 layers; convert"),
        (lambda f: forge(f, num_hidden_layers=3_000_000), "num_layers is 3000000"),
        (lambda f: forge(f, num_hidden_layers=4), "layer_003: not a whole Orbax checkpoint"),
        (lambda f: forge(f, vocab_size=65), r"embedding has shape \[64, 32\], the config asks for \[65"),
        (lambda f: forge(f, tie_word_embeddings=True), "embedder: arrays unknown: head"),
        (lambda f: shutil.rmtree(f / "layer_001"), "layer_001: not a whole Orbax checkpoint"),
        (cut_data, "layer_001: not a whole Orbax checkpoint"),
        (flip_a_bit, r"layer_001: ([a-z/]+\[0:\d+, 0:\d+\] is damaged|not a whole Orbax).*; convert the model again"),
        (lambda f: (f / "config.json").unlink(), "config.json: No such file"),
        (lambda f: edit(f / "mooncake_checkpoint.json", format=9), "format is 9, not 2"),
        (
            lambda f: (f / "generation_config.json").write_text('{"eos_token_id": 3}'),
            "/generation_config.json: not as it",
        ),
        (lambda f: edit(f / "mooncake_checkpoint.json", files=None), "files is None, not an object"),
        (lambda f: edit(f / "mooncake_checkpoint.json", files={}), "/config.json: not as it was written"),
        (lambda f: edit(f / "mooncake_checkpoint.json", sha256="x"), "sha256 is 'x'"),
        (lambda f: edit(f / "mooncake_checkpoint.json", sha256=""), "sha256 is '', not 32 bytes"),
        (lambda f: edit(f / "mooncake_checkpoint.json", sha256="00" * 33), "sha256 is '0.*, not 32 bytes"),
    ],
)
def test_damage_is_named(broken, damage, complaint):
    load_model(broken, "bfloat16")
    damage(broken)
    with pytest.raises(UsageError, match=complaint) as caught:
        load_model(broken, "bfloat16")
    assert "\n" not in str(caught.value)


def test_an_untied_head_that_is_missing_is_named(tmp_path):
    convert_model(DATA / "tiny-llama3", tmp_path / "m", "float32", lambda done, total: None)
    forge(tmp_path / "m", tie_word_embeddings=False)
    with pytest.raises(UsageError, match="embedder: arrays missing: head"):
        load_model(tmp_path / "m", "float32")
