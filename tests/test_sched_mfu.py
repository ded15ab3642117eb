"""MFU of the prefill pool: useful FLOPs by hand, and what is told about the bound."""

import json
import math

import pytest
from virtual_cluster import make_actors, make_request, run

from mooncake_jax.model.architectures import ARCHITECTURES
from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.sched.messages import CONDUCTOR
from mooncake_jax.sched.mfu import PrefillWork, prefill_mfu

LLAMA2_70B = ARCHITECTURES["llama2-70b"]


def done(*prefills):
    work = PrefillWork()
    for tokens, prefix in prefills:
        work.add(tokens, prefix)
    return work


def test_work_by_hand():
    work = done((4, 0), (6, 4))
    assert (work.prefills, work.tokens) == (2, 6)
    assert work.pairs == (1 + 2 + 3 + 4) + (5 + 6), "each new token attends to all up to itself"


def test_reuse_splits_the_work_and_adds_none():
    assert done((1000, 600)).flops(LLAMA2_70B) + done((600, 0)).flops(LLAMA2_70B) == done((1000, 0)).flops(LLAMA2_70B)


def test_flops_have_the_form_that_the_paper_gives():
    """FAST25 table 1: a layer takes a n^2 d + b n d^2. Its a = 4 counts masked pairs too; its b = 22 is less than the
    sum of the products: 2 (2 + 2 / 8 + 3 * 3.5).
    """
    n, d, layers = 8192, LLAMA2_70B.hidden_size, LLAMA2_70B.num_layers
    expected = layers * (4 / 2 * n * (n + 1) * d + 25.5 * n * d * d)
    assert done((n, 0)).flops(LLAMA2_70B) == pytest.approx(expected, rel=1e-12)


def test_conductor_counts_prefills_that_are_done():
    prompt = [3] * 100
    requests = [
        make_request("first", prompt),
        make_request("again", prompt + [4] * 60, arrival=5.0),
        make_request("fails", [5] * 70, arrival=10.0),
    ]
    actors = make_actors(prefill=1)
    run(actors, requests, failing={"fails"})
    assert actors[CONDUCTOR].prefill_work == {"prefill0": done((100, 0), (160, 96))}


def test_shares_of_the_peak():
    told = prefill_mfu({"prefill0": 3e12, "prefill1": 1e12}, {"prefill0": 1e12, "prefill1": 3e12}, 10.0, 0.1)
    assert told["instances"] == {"prefill0": 0.3, "prefill1": pytest.approx(1 / 30)}
    assert told["pool"] == 0.1 and told["floor_met"] is True, "a bound is met where it is reached"
    assert prefill_mfu({"prefill0": 3e12}, {"prefill0": 1e12}, 10.0, 0.31)["floor_met"] is False
    assert prefill_mfu({"prefill0": 3e12}, {"prefill0": 1e12}, 10.0, None)["floor_met"] is None


@pytest.mark.parametrize("duration_s", [0.0, math.nan])
def test_without_time_there_is_no_share(duration_s):
    told = prefill_mfu({"prefill0": 0}, {"prefill0": 1e12}, duration_s, 0.5)
    assert (told["pool"], told["instances"], told["floor_met"]) == (None, {"prefill0": None}, None)
    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_grouped_queries_and_narrow_heads_count_as_they_are():
    model = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rope_theta=1e4,
        rope_scaling=None,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        max_context=64,
    )
    weights = 64 * (2 * 32 + 2 * 16 + 3 * 96)
    assert done((3, 0)).flops(model) == 2 * (2 * 3 * weights + 4 * 32 * 6)
