"""Configurations as data: published totals, the abstract model, and what config.json makes of them."""

import jax
import jax.numpy as jnp
import pytest
from conftest import DATA

from mooncake_jax.model.architectures import ARCHITECTURES
from mooncake_jax.model.config import LlamaConfig, RopeDivisors
from mooncake_jax.model.llama import abstract_llama
from mooncake_jax.model.sources import inspect_model

PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parameters_as_published_and_as_the_model_has_them(name):
    config = ARCHITECTURES[name]
    assert config.parameters == PUBLISHED[name]
    assert sum(leaf.size for leaf in jax.tree.leaves(abstract_llama(config, jnp.bfloat16))) == config.parameters


def test_kvcache_of_a_token():
    assert ARCHITECTURES["llama2-70b"].kv_bytes_per_token("bfloat16") == 320 * 1024
    assert ARCHITECTURES["llama2-7b"].kv_bytes_per_token("bfloat16") == 512 * 1024
    assert ARCHITECTURES["llama3.1-8b"].kv_bytes_per_token("float32") == 256 * 1024


def test_llama31_is_llama3_with_stretched_rope():
    plain, stretched = ARCHITECTURES["llama3-8b"], ARCHITECTURES["llama3.1-8b"]
    ratio = plain.rope_frequencies() / stretched.rope_frequencies()
    assert (ratio[0], stretched.max_context) == (1, 131072)
    assert ratio[-1] == pytest.approx(8, rel=1e-6)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_config_survives_hugging_faces_form(name):
    config = ARCHITECTURES[name]
    assert LlamaConfig.from_hf(config.to_hf()) == config


def test_rope_divisors_survive_too():
    config = inspect_model(DATA / "tiny-llama2")[0].to_hf()
    config["rope_scaling"] = {"rope_type": "divisors", "divisors": [1.0, 1.5, 2.0, 2.5]}
    read = LlamaConfig.from_hf(config)
    assert read.rope_scaling == RopeDivisors((1.0, 1.5, 2.0, 2.5))
    assert LlamaConfig.from_hf(read.to_hf()) == read


def test_smollm2_is_as_its_file_says(smollm2_path):
    config, _ = inspect_model(smollm2_path)
    assert {**config.to_hf(), "rms_norm_eps": 1e-5} == ARCHITECTURES["smollm2-135m"].to_hf()
