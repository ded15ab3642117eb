"""Dummy weights: known by name and seed, the same every time, and tame in bfloat16."""

import hashlib
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import DATA, PlainModel

from mooncake_jax.errors import UsageError
from mooncake_jax.model.architectures import ARCHITECTURES
from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.model.dummy import DummyModel
from mooncake_jax.model.loading import load_model
from mooncake_jax.model.sources import inspect_model, model_fingerprint

SHAPE = LlamaConfig(320, 64, 176, 40, 8, 2, 8, 10000.0, None, 1e-5, False, 256)


def test_names():
    assert DummyModel.parse("dummy:llama2-70b") == DummyModel(ARCHITECTURES["llama2-70b"], 0)
    assert DummyModel.parse("dummy:llama2-70b:12").seed == 12
    for name, complaint in {
        "dummy:": "no architecture '' is known; use one of smollm2-135m, llama2-7b",
        "dummy:gpt": "no architecture 'gpt' is known; use one of .*, or a folder with a config.json",
        "dummy:llama2-7b:": "the seed is ''",
        "dummy:llama2-7b:-1": "the seed is '-1'",
        "dummy:llama2-7b:2147483648": "the seed is '2147483648'",
    }.items():
        with pytest.raises(UsageError, match=complaint):
            DummyModel.parse(name)


def test_a_folder_with_a_config_is_as_good_as_a_name():
    model = DummyModel.parse(f"dummy:{DATA / 'tiny-llama3'}:3")
    assert (model.config().num_kv_heads, model.seed) == (4, 3)
    with pytest.raises(UsageError, match="or a folder with a config.json"):
        DummyModel.parse(f"dummy:{DATA}")


def test_a_name_is_enough_for_what_schedulers_need():
    model = DummyModel.parse("dummy:llama2-70b")
    assert inspect_model(model) == (ARCHITECTURES["llama2-70b"], None)
    prints = {model_fingerprint(DummyModel(SHAPE, seed), dtype) for seed in (0, 1) for dtype in ("float32", "bfloat16")}
    assert len(prints) == 4
    assert model_fingerprint(DummyModel(SHAPE, 1), "float32") in prints


def leaves(model):
    return jax.tree.leaves((model.embedder, model.layers))


def test_the_same_seed_gives_the_same_weights_and_bfloat16_their_roundings():
    once, again, other = (load_model(DummyModel(SHAPE, seed), "float32") for seed in (5, 5, 6))
    rounded = load_model(DummyModel(SHAPE, 5), "bfloat16")
    matrices = 0
    for a, b, c, r in zip(*map(leaves, (once, again, other, rounded)), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a.astype(r.dtype), r)
        matrices += not np.array_equal(a, c)
    assert matrices == 2 + 7 * SHAPE.num_layers
    first, second = (np.asarray(layer["mlp"]["up"]["kernel"]) for layer in once.layers[:2])
    assert not np.array_equal(first, second)


def head_digest():
    head = load_model(DummyModel(SHAPE, 5), "float32").embedder["head"]
    return hashlib.sha256(np.asarray(head).tobytes()).hexdigest()


def test_another_process_makes_the_same_weights():
    code = "import test_model_dummy; print(test_model_dummy.head_digest())"
    folder = Path(__file__).parent
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, check=True)
    assert found.stdout.strip() == head_digest()


def test_activations_stay_tame_through_many_layers_in_bfloat16():
    logits, kv = PlainModel(load_model(DummyModel(SHAPE, 0), "bfloat16")).forward(list(range(100)))
    assert np.isfinite(logits).all() and np.isfinite(kv.astype(np.float32)).all()
    assert 0.3 < logits.std() < 3
    assert 0.3 < kv.astype(np.float32).std() < 3
