"""config.json: every value that no model can have is refused in one line that names file, field and value."""

import json
import math

import pytest
from conftest import DATA

from mooncake_jax.errors import UsageError
from mooncake_jax.model.config import LlamaConfig, RopeDivisors
from mooncake_jax.model.files import read_json

PLAIN = json.loads((DATA / "tiny-llama2" / "config.json").read_text())
LLAMA3 = json.loads((DATA / "tiny-llama3" / "config.json").read_text())
NO_NUMBERS = (None, "x", [], {}, [1.0], True, math.nan, math.inf, -math.inf, -1, 0, 1e39, 10**400, 1e-60)
NO_SIZES = (None, "x", [], {}, [64], True, 0, -1, 64.0, math.inf, 2**31, 10**400)


def refused(complaint, config):
    with pytest.raises(UsageError, match=f"^there/config.json: .*{complaint}.*; ") as caught:
        LlamaConfig.from_hf(config, "there/config.json")
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 300


def test_what_is_edited_here_is_whole():
    assert LlamaConfig.from_hf(PLAIN).num_layers == 4
    assert LlamaConfig.from_hf(LLAMA3).rope_scaling.factor == 8.0


@pytest.mark.parametrize("value", NO_NUMBERS, ids=str)
def test_numbers_are_finite_and_above_0(value):
    refused("rms_norm_eps is", PLAIN | {"rms_norm_eps": value})
    refused("rope_theta is", PLAIN | {"rope_parameters": {"rope_type": "default", "rope_theta": value}})
    refused("rope_theta is", PLAIN | {"rope_parameters": None, "rope_theta": value})
    for field in ("factor", "low_freq_factor", "high_freq_factor"):
        refused(f"{field} is", LLAMA3 | {"rope_parameters": LLAMA3["rope_parameters"] | {field: value}})
    refused("divisors is", PLAIN | {"rope_parameters": {"rope_type": "divisors", "divisors": [1.0, value, 1.0, 1.0]}})


@pytest.mark.parametrize("value", NO_SIZES, ids=str)
def test_sizes_are_positive_integers(value):
    field = "original_max_position_embeddings"
    refused(f"{field} is", LLAMA3 | {"rope_parameters": LLAMA3["rope_parameters"] | {field: value}})
    for field in ("vocab_size", "hidden_size", "num_hidden_layers"):
        refused(f"{field} is", PLAIN | {field: value})


def test_a_depth_that_no_model_has():
    refused("num_layers is 3000000, and no model has over 10000", PLAIN | {"num_hidden_layers": 3_000_000})


@pytest.mark.parametrize("value", [None, 0, 1, "false", "true", [], {}], ids=str)
def test_flags_are_true_or_false(value):
    refused("tie_word_embeddings is", PLAIN | {"tie_word_embeddings": value})


@pytest.mark.parametrize("value", ["x", "", 5, 0, True, False, [], [1]], ids=str)
def test_rope_is_an_object(value):
    refused("rope_parameters is", PLAIN | {"rope_parameters": value})
    refused("rope_scaling is", PLAIN | {"rope_parameters": None, "rope_scaling": value})


@pytest.mark.parametrize("low, high", [(4.0, 4.0), (4.0, 1.0)])
def test_the_blend_between_waves_needs_room(low, high):
    rope = LLAMA3["rope_parameters"] | {"low_freq_factor": low, "high_freq_factor": high}
    refused(
        f"low_freq_factor is {low}, not below high_freq_factor, which is {high}", LLAMA3 | {"rope_parameters": rope}
    )


@pytest.mark.parametrize("divisors", [None, 5, "x", {}, [1.0, "x", 1.0, 1.0]], ids=str)
def test_divisors_are_a_list(divisors):
    refused("divisors is", PLAIN | {"rope_parameters": {"rope_type": "divisors", "divisors": divisors}})


def test_divisors_of_another_file_are_checked_too():
    config = LlamaConfig(320, 64, 176, 4, 8, 2, 8, 1e4, RopeDivisors((1.0, 0.0, 1.0, 1.0)), 1e-5, False, 2048)
    with pytest.raises(UsageError, match=r"f.gguf: RoPE divisors are \(1.0, 0.0, 1.0, 1.0\); use a file"):
        config.refuse_odd_shapes("f.gguf")


def test_variants_that_would_be_computed_wrongly():
    refused("quantization_config is {.*'gptq'", PLAIN | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    refused("partial_rotary_factor is 0.5", PLAIN | {"partial_rotary_factor": 0.5})
    rope = PLAIN["rope_parameters"] | {"partial_rotary_factor": 0.25}
    refused("partial_rotary_factor is 0.25", PLAIN | {"rope_parameters": rope})
    whole = PLAIN | {"quantization_config": None, "partial_rotary_factor": 1.0}
    assert LlamaConfig.from_hf(whole) == LlamaConfig.from_hf(PLAIN)


def test_a_long_or_deep_value_is_cut():
    deep = []
    for _ in range(100):
        deep = [deep]
    for value in ("x" * 10_000, [1] * 10_000, deep, {str(i): i for i in range(1000)}):
        refused("rms_norm_eps is", PLAIN | {"rms_norm_eps": value})
        refused("RoPE scaling|rope_type", PLAIN | {"rope_parameters": {"rope_type": value}})


@pytest.mark.parametrize(
    "text, told",
    [
        ('{"vocab_size": 1, "x": 2, "vocab_size": 3}', "'vocab_size' is both 1 and 3"),
        ('{"rope_scaling": {"factor": 8, "factor": 4}}', "'factor' is both 8 and 4"),
        ('{"x": "%s", "x": null}' % ("long" * 100), "'x' is both 'longlong.*long' and None"),
    ],
)
def test_a_key_with_two_values(tmp_path, text, told):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=f"config.json: {told}; correct the file or fetch the model again$") as caught:
        read_json(path)
    assert len(str(caught.value)) < len(str(path)) + 200


def test_a_key_given_twice_with_one_value_does_no_harm(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"a": [1], "b": 2, "a": [1]}')
    assert read_json(path) == {"a": [1], "b": 2}
    path.write_text('{"a": NaN}')
    assert math.isnan(read_json(path)["a"])
