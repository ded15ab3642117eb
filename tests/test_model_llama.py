"""The model's arithmetic on tiny LLaMAs against transformers, and its configuration."""

import json

import numpy as np
import pytest
from conftest import DATA

from mooncake_jax.errors import UsageError
from mooncake_jax.model.config import LlamaConfig, RopeScaling

LLAMA2_70B = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
}
LLAMA31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_logits_at_every_position_keys_values_and_continuation(tiny):
    _, plain, golden = tiny
    logits, kv = plain.forward(golden["input_ids"])
    np.testing.assert_allclose(logits, golden["logits"], atol=1e-4)
    np.testing.assert_allclose(kv[0, 0].swapaxes(0, 1), golden["layer0_keys"], atol=1e-4)
    np.testing.assert_allclose(kv[-1, 1].swapaxes(0, 1), golden["last_layer_values"], atol=1e-4)
    assert plain.greedy(golden["greedy_prompt"], len(golden["greedy"])) == golden["greedy"].tolist()


def test_one_definition_serves_all_layers_and_parameters_are_plain(tiny2):
    assert len(tiny2.layers) == 4
    assert type(tiny2.layers[0]) is dict
    assert tiny2.layers[0]["attention"]["k"]["kernel"].shape == (64, 16)  # [in, out]


def test_config_of_llama2_as_published():
    config = LlamaConfig.from_hf(LLAMA2_70B)
    assert (config.head_dim, config.rope_theta, config.rope_scaling, config.tie_word_embeddings) == (
        128,
        10000.0,
        None,
        False,
    )
    assert config.kv_bytes_per_token("bfloat16") == 320 * 1024
    assert config.kv_bytes_per_token("float32") == 640 * 1024


def test_config_reads_old_and_new_rope_spellings():
    old = LlamaConfig.from_hf(LLAMA2_70B | {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA31}})
    new = LlamaConfig.from_hf(
        LLAMA2_70B | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA31}}
    )
    assert old == new
    assert old.rope_scaling == RopeScaling(**LLAMA31)


def test_llama3_scaling_keeps_fast_waves_and_stretches_slow_ones():
    plain = LlamaConfig.from_hf(LLAMA2_70B | {"rope_theta": 500000.0})
    scaled = LlamaConfig.from_hf(LLAMA2_70B | {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **LLAMA31}})
    ratio = plain.rope_frequencies() / scaled.rope_frequencies()
    assert ratio[0] == 1 and ratio[-1] == pytest.approx(8, rel=1e-6)
    assert (np.diff(ratio) > -1e-5).all() and len(np.unique(ratio.round(3))) > 3


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"model_type": "mistral"}, "model_type is 'mistral'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "RoPE scaling 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks 'low_freq_factor'"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"vocab_size": -5}, "vocab_size is -5"),
        ({"hidden_size": "8192"}, "hidden_size is '8192'"),
        ({"num_key_value_heads": 7}, "64 query heads cannot share 7 KV heads"),
        ({"head_dim": 63}, "head_dim is 63"),
    ],
)
def test_config_refuses(change, complaint):
    with pytest.raises(UsageError, match="^there/config.json: .*" + complaint) as caught:
        LlamaConfig.from_hf(LLAMA2_70B | change, "there/config.json")
    assert "\n" not in str(caught.value)


def test_config_of_the_tiny_models():
    config = LlamaConfig.from_hf(json.loads((DATA / "tiny-llama3" / "config.json").read_text()))
    assert config == LlamaConfig(320, 64, 176, 6, 8, 4, 8, 500000.0, RopeScaling(8.0, 1.0, 4.0, 64), 1e-5, True, 2048)
