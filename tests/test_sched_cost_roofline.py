"""The roofline: by hand, against the FLOPs of parallel/plan.py, and what changes with accelerator and tp."""

import dataclasses

import pytest

from mooncake_jax.errors import UsageError
from mooncake_jax.model.architectures import ARCHITECTURES
from mooncake_jax.parallel import plan
from mooncake_jax.sched import roofline as module
from mooncake_jax.sched.accelerators import ACCELERATORS, SOURCES, Accelerator
from mooncake_jax.sched.profiles import A800_EFFICIENCY, A800_LLAMA2_70B, roofline
from mooncake_jax.sched.roofline import Efficiency

LLAMA70B = ARCHITECTURES["llama2-70b"]
PERFECT = Efficiency(products=1.0, attention=1.0, memory=1.0, links=1.0, step_s=0.0, request_s=0.0)
GATHER_S = 80 * 2 * 8192 * 2 * (2 * 7 / 8) / 200e9  # of a token's hidden states, twice a layer, over eight A800


def perfect(model=LLAMA70B, accelerator="a800", tp=8):
    return dataclasses.replace(roofline(model, accelerator, tp), efficiency=PERFECT)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_flops_are_those_that_plans_are_compared_with(name):
    model, tokens = ARCHITECTURES[name], 1000
    pairs = tokens * tokens / 2
    ours = 2 * module.layer_weights(model) * tokens + module.pair_flops(model) * pairs
    assert ours == pytest.approx(plan.formula_flops(model, tokens, pairs, plan.linear_factor(model)))


def test_a_long_prefill_takes_its_flops_and_all_reduces_at_the_peaks():
    n = 8192
    flops = 80 * (25.5 * n * 8192**2 + 2 * n * n * 8192)
    assert perfect().prefill(n, 0) == pytest.approx(flops / (8 * 312e12) + n * GATHER_S)


def test_a_short_prefill_takes_as_long_as_reading_the_weights():
    weights = 80 * 25.5 / 2 * 8192**2 * 2
    assert perfect().prefill(1, 0) == pytest.approx(weights / (8 * 2.039e12) + GATHER_S, rel=1e-5)
    assert perfect().prefill(2, 0) == pytest.approx(weights / (8 * 2.039e12) + 2 * GATHER_S, rel=1e-5)


def test_a_step_takes_as_long_as_reading_weights_and_kvcache():
    read = (LLAMA70B.parameters - LLAMA70B.vocab_size * 8192) * 2 + 16 * 8192 * 327_680
    assert perfect().step(16, 16 * 8192) == pytest.approx(read / (8 * 2.039e12) + 16 * GATHER_S, rel=1e-4)
    # Beyond some batch products take longer than reading the weights.
    per_request = perfect().step(4001, 0) - perfect().step(4000, 0)
    assert per_request == pytest.approx(2 * 69e9 / (8 * 312e12), rel=0.5)


def test_one_device_gathers_nothing():
    small = ARCHITECTURES["llama3-8b"]
    alone, pair = perfect(small, "h100", 1), perfect(small, "h100", 2)
    assert alone.prefill(4096, 0) < 2 * pair.prefill(4096, 0)
    assert alone.prefill(4096, 0) == pytest.approx(
        (2 * module.layer_weights(small) * 4096 + module.pair_flops(small) * 4096**2 / 2) / 989e12
    )


@pytest.mark.parametrize(("slower", "faster"), [("a800", "a100"), ("h800", "h100"), ("a100", "h100")])
def test_a_better_accelerator_is_faster(slower, faster):
    ours, theirs = (roofline(LLAMA70B, name, 8) for name in (slower, faster))
    assert theirs.prefill(16384, 0) < ours.prefill(16384, 0)


def test_more_memory_bandwidth_makes_steps_faster_and_prefill_no_faster():
    h100, h200 = roofline(LLAMA70B, "h100", 8), roofline(LLAMA70B, "h200", 8)
    assert h200.step(8, 65536) < h100.step(8, 65536)
    assert h200.prefill(16384, 0) == h100.prefill(16384, 0)


def test_reuse_spares_computing_and_costs_loading():
    cost = A800_LLAMA2_70B
    assert cost.prefill_compute(32768, 16384) == pytest.approx(
        cost.prefill_compute(32768, 0) - cost.prefill_compute(16384, 0), rel=1e-9
    )
    loading = cost.prefill(32768, 16384) - cost.prefill_compute(32768, 16384)
    assert loading == pytest.approx(0.0667 + 16384 * 327_680 / 132.3e9)


def test_every_figure_has_a_source():
    figures = {field.name for field in dataclasses.fields(Accelerator)}
    assert {name: set(sources) for name, sources in SOURCES.items()} == {name: figures for name in ACCELERATORS}
    assert {"a800", "a100", "h800", "h100", "h200", "tpu-v5e", "tpu-v5p"} <= set(ACCELERATORS)


@pytest.mark.parametrize(
    ("accelerator", "tp", "complaint"),
    [
        ("h300", 8, "accelerator is 'h300'; use one of a800, .*"),
        ("h100", 0, "tp is 0; it must be at least 1"),
        ("tpu-v5e", 8, "tp is 8: weights of 138 GB do not fit into 128 GB of 8 tpu-v5e; raise tp"),
    ],
)
def test_what_cannot_be_is_refused(accelerator, tp, complaint):
    with pytest.raises(UsageError, match=complaint):
        roofline(LLAMA70B, accelerator, tp)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, float("nan")])
def test_shares_of_a_peak_are_shares(share):
    with pytest.raises(UsageError, match=f"efficiency memory is {share}; it must be above 0 and at most 1"):
        dataclasses.replace(A800_EFFICIENCY, memory=share)


def test_times_are_the_same_bit_for_bit_everywhere():
    assert A800_LLAMA2_70B.prefill(12345, 678).hex() == "0x1.83e4313010c79p+0"
    assert A800_LLAMA2_70B.step(17, 98765).hex() == "0x1.052ad36ee523ap-5"
