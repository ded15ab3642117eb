"""Coupled instances in virtual time: each mode's times by hand, reuse, memory, skipped steps, and the real trace."""

import gc
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import BLOCK, COST, by_id, make_config, make_request, outcomes, random_requests

from mooncake_jax.errors import UsageError
from mooncake_jax.metrics import attained, mean
from mooncake_jax.request import COMPLETED, FAILED, REJECTED, SLO
from mooncake_jax.sched.cost import PolynomialCost
from mooncake_jax.sched.coupled import COUPLED_MODES
from mooncake_jax.sched.decisions import Dispatch
from mooncake_jax.sched.profiles import PROFILES
from mooncake_jax.simulate.config import SimulationConfig
from mooncake_jax.simulate.run import simulate
from mooncake_jax.simulate.traces import keyed_requests
from mooncake_jax.workload.trace import read_trace

LINEAR = PolynomialCost((0.0, 1e-3, 0.0), (0.01, 1e-3, 0.0), (0.0, 0.0))  # 1 ms a token; 10 ms a step, 1 ms a request


def coupled(requests, mode="plain", cost=LINEAR, **changes):
    """One instance unless more are asked for."""
    defaults = {"coupled": 1, "coupled_mode": mode, "policy": "load-balancing", "admission": "none"}
    return outcomes(requests, cost, **defaults | changes)


def gaps(outcome):
    """Of a request of three tokens: their mean and the longest."""
    return [2 * outcome.tbt_mean_s - outcome.tbt_top10_s, outcome.tbt_top10_s]


def two(output=3):
    """The second comes while the first decodes: in its first step, which takes from 0.100 to 0.111 s."""
    return [make_request("a", 100, 0.0, output), make_request("b", 50, 0.105, 2)]


def test_a_waiting_prompt_goes_before_decoding():
    found = coupled(two())
    assert found["a"].ttft_s == pytest.approx(0.100, rel=1e-12)
    assert found["b"].ttft_s == pytest.approx(0.161 - 0.105, rel=1e-12), "once the step under way has ended"
    assert gaps(found["a"]) == pytest.approx([0.011, 0.050 + 0.012], rel=1e-12), "a's token waits for all of b's prompt"
    assert found["b"].tbt_mean_s == pytest.approx(0.012, rel=1e-12)
    assert {(o.prefill_instance, o.decoding_instance) for o in found.values()} == {("coupled0", "coupled0")}


def test_chunks_share_iterations_with_decoding():
    """64 tokens an iteration, of which each that decodes takes one; a step's 10 ms are not taken beside a chunk's."""
    found = coupled(two(), "chunked_prefill", token_budget=64)
    assert found["a"].ttft_s == pytest.approx(0.100, rel=1e-12)
    assert found["b"].ttft_s == pytest.approx(0.111 + 0.050 + 0.001 - 0.105, rel=1e-12)
    assert gaps(found["a"]) == pytest.approx([0.011, 0.051], rel=1e-12), "a decodes beside b's prompt"


def test_a_long_prompt_takes_many_chunks():
    """b's 150 tokens go in 63, 63 and 24; beside the first two of them a decodes its last tokens."""
    found = coupled(
        [make_request("a", 100, 0.0, 4), make_request("b", 150, 0.105, 1)], "chunked_prefill", token_budget=64
    )
    assert found["b"].ttft_s == pytest.approx(0.111 + 0.150 + 2 * 0.001 - 0.105, rel=1e-12)
    assert found["a"].tbt_top10_s == pytest.approx(0.064, rel=1e-12)
    assert found["a"].tbt_mean_s == pytest.approx((0.011 + 0.064 + 0.064) / 3, rel=1e-12)


def test_a_chunk_that_is_short_takes_as_long_as_a_step():
    found = coupled([make_request("a", 100, 0.0, 3), make_request("b", 4, 0.105, 1)], "chunked_prefill")
    assert found["b"].ttft_s == pytest.approx(0.111 + 0.011 - 0.105, rel=1e-12)


def test_one_by_one_is_strictly_serial():
    found = coupled(two(), "one_by_one")
    assert gaps(found["a"]) == pytest.approx([0.011, 0.011], rel=1e-12)
    assert found["b"].ttft_s == pytest.approx(0.122 + 0.050 - 0.105, rel=1e-12)


def test_prompts_share_an_iteration_within_the_budget():
    """Three of 60 tokens wait behind a: two fit into 130, and a decodes when all are done."""
    requests = [make_request("a", 100, 0.0, 2), *(make_request(name, 60, 0.05, 2) for name in "bcd")]
    found = coupled(requests, token_budget=130, max_batch=8)
    assert [found[name].ttft_s for name in "bcd"] == pytest.approx([0.17, 0.17, 0.23], rel=1e-12)
    assert found["a"].tbt_mean_s == pytest.approx(0.18 + 0.014, rel=1e-12)


def test_a_prompt_above_the_budget_goes_alone():
    found = coupled(
        [make_request("a", 100), make_request("b", 300, 0.05), make_request("c", 60, 0.05)], token_budget=130
    )
    assert [found[name].ttft_s for name in "bc"] == pytest.approx([0.35, 0.41], rel=1e-12)


def test_conductor_takes_its_time_to_decide():
    assert coupled([make_request("a", 100)], decision_s=0.05)["a"].ttft_s == pytest.approx(0.15, rel=1e-12)


def test_prompts_wait_for_room_in_the_batch_and_in_memory():
    requests = [make_request("a", 100, 0.0, 4), make_request("b", 50, 0.0, 1)]
    for full in ({"max_batch": 1}, {"device_kv_tokens": 8 * BLOCK}):  # 7 pages for a, 4 for b
        found = coupled(requests, **full)
        assert found["b"].ttft_s == pytest.approx(0.1 + 3 * 0.011 + 0.05, rel=1e-12)


def test_what_is_left_of_memory_is_a_prefix_cache():
    """12 pages: a's 6 blocks stay; the 8 pages of another take the 2 that its prompt ends with."""
    a, again = (make_request(name, 96, at, chain="c", shared=6) for name, at in (("a", 0.0), ("again", 20.0)))
    changes = {"device_kv_tokens": 12 * BLOCK}
    warm = coupled([a, again], "prefix_cache", **changes)["again"]
    assert (warm.reused_tokens, warm.ttft_s) == (95, pytest.approx(0.001, rel=1e-9))
    after = coupled([a, make_request("other", 112, 10.0), again], "prefix_cache", **changes)["again"]
    assert (after.reused_tokens, after.ttft_s) == (64, pytest.approx(0.032, rel=1e-9))
    assert coupled([a, again], "plain", **changes)["again"].reused_tokens == 0


def test_requests_that_run_at_once_share_their_blocks():
    """Each alone takes 11 of 16 pages; the second needs but one beside the first's ten blocks."""
    requests = [make_request(name, 165, at, 40, chain="c", shared=10) for name, at in (("a", 0.0), ("b", 0.2))]
    shared = coupled(requests, "prefix_cache", device_kv_tokens=16 * BLOCK)["b"]
    assert shared.reused_tokens == 160 and shared.ttft_s < 0.03
    assert coupled(requests, "plain", device_kv_tokens=16 * BLOCK)["b"].ttft_s > 0.4


def test_prefill_seconds_and_reuse_are_told():
    requests = [make_request(name, 160, at, chain="c", shared=10) for name, at in (("a", 0.0), ("b", 20.0))]
    config = make_config(coupled=1, coupled_mode="prefix_cache", policy="random")
    hardware = simulate(config, LINEAR, requests).hardware
    assert hardware["prefill_compute_s"] == {"coupled0": pytest.approx(0.161, rel=1e-12)}
    assert hardware["prefill_compute_s_mean"] == pytest.approx(0.161 / 2, rel=1e-12)
    assert hardware["decoding_steps"] == {"coupled0": 6}


def test_requests_go_where_the_fewest_are_outstanding():
    """Those that decode count: a's prefill has long ended when c comes."""
    requests = [make_request("a", 50, 0.0, 60), make_request("b", 50, 0.01, 2), make_request("c", 50, 0.5, 2)]
    found = coupled(requests, coupled=2)
    assert [found[name].decoding_instance for name in "abc"] == ["coupled0", "coupled1", "coupled1"]


@pytest.mark.parametrize("policy", ["random", "round-robin"])
def test_other_policies_use_all_instances(policy):
    found = coupled(random_requests(3, 40), coupled=3, policy=policy)
    assert {outcome.decoding_instance for outcome in found.values()} == {"coupled0", "coupled1", "coupled2"}
    assert all(outcome.prefill_instance == outcome.decoding_instance for outcome in found.values())


class Splitting:
    """Prefills here and decodes there."""

    def choose(self, request, view, now):
        return Dispatch("coupled0", "coupled1", 0.0, 0.0)


def test_a_policy_that_splits_a_request_fails_it():
    found = coupled([make_request("a", 50)], coupled=2, policy="test_simulate_coupled:Splitting")
    assert found["a"].status == FAILED
    assert "sends KVCache to 'coupled1', but coupled instances send one another none" in found["a"].reason


def test_policies_that_go_by_the_pool_are_refused():
    with pytest.raises(UsageError, match="--policy=kvcache-centric: coupled instances share no KVCache"):
        coupled([], policy="kvcache-centric")


def test_long_prompts_are_dropped_where_asked_for():
    requests = [make_request("long", 101), make_request("short", 100)]
    for cluster in ({"coupled": 1, "policy": "random"}, {}):
        found = outcomes(requests, drop_over=100, **cluster)
        assert found["long"].reason == "the prompt has more than 100 tokens"
        assert [found[name].status for name in ("long", "short")] == [REJECTED, COMPLETED]


@pytest.mark.parametrize("mode", COUPLED_MODES)
@pytest.mark.parametrize("admission", ["none", "baseline", "slo", "early-predicted"])
def test_every_request_ends_once_and_all_invariants_hold(mode, admission):
    requests = random_requests(1, 80, rate=20.0)
    limits = {"ttft_slo": 1.0, "tbt_slo": 0.05, "request_timeout": 2.0, "token_budget": 200}
    found = coupled(requests, mode, COST, coupled=2, admission=admission, **limits)
    assert found.keys() == {request.id for request in requests}
    ended = {outcome.status for outcome in found.values()}
    assert COMPLETED in ended and (REJECTED if admission != "none" else FAILED) in ended


def test_littles_law():
    """Requests present on average are those that arrive in a second times the seconds that each stays."""
    requests = random_requests(6, 400, rate=3.0)
    config = make_config(coupled=1, policy="random", admission="none", device_kv_tokens=300 * BLOCK, max_batch=64)
    run = simulate(config, COST, requests)
    stays = [o.ttft_s + (o.output_tokens - 1) * (o.tbt_mean_s or 0.0) for o in run.outcomes]
    changes = [(o.arrival_s, 1) for o in run.outcomes]
    changes += [(o.arrival_s + stay, -1) for o, stay in zip(run.outcomes, stays)]
    area, present, since = 0.0, 0, 0.0
    for at, change in sorted(changes):
        area, present, since = area + present * (at - since), present + change, at
    assert present == 0 and area / run.duration_s == pytest.approx(400 / run.duration_s * mean(stays), rel=1e-9)
    device = run.hardware["decoding_busy_s"]["coupled0"] + run.hardware["prefill_compute_s"]["coupled0"]
    assert device < run.duration_s
    sums = [COST.prefill_compute(r.prompt_tokens, 0) for r in requests]
    assert run.hardware["prefill_compute_s"]["coupled0"] == pytest.approx(math.fsum(sums), rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 40),
    rate=st.sampled_from([1.0, 8.0, 60.0]),
    mode=st.sampled_from(sorted(COUPLED_MODES)),
    admission=st.sampled_from(["none", "baseline", "slo", "early", "request-level"]),
    instances=st.integers(1, 3),
    max_batch=st.integers(1, 6),
    timeout=st.sampled_from([float("inf"), 1.0]),
    token_budget=st.sampled_from([3, 100, 1000]),
)
def test_skipping_changes_nothing(seed, count, rate, mode, admission, instances, max_batch, timeout, token_budget):
    runs = [
        simulate(
            make_config(
                coupled=instances,
                coupled_mode=mode,
                policy="load-balancing",
                admission=admission,
                max_batch=max_batch,
                tbt_slo=0.05,
                ttft_slo=2.0,
                request_timeout=timeout,
                token_budget=token_budget,
                single_steps=single,
            ),
            COST,
            random_requests(seed, count, rate),
        )
        for single in (False, True)
    ]
    assert by_id(runs[0]) == by_id(runs[1])
    assert runs[0].hardware["decoding_steps"] == runs[1].hardware["decoding_steps"]


CONSTANT_S, REQUEST_S, TOKEN_S = PROFILES["vllm-chunked"].step_coefficients
QUICKER_STEP = (CONSTANT_S + REQUEST_S - 3.5e-3, 3.5e-3, TOKEN_S)  # a request more adds 3.5 ms


@pytest.mark.traces
@pytest.mark.parametrize(
    ("mode", "cost", "seconds", "shares"),
    [
        ("prefix_cache", PROFILES["vllm"], 1.549, (23.3, 47.0, 67.8)),
        pytest.param("plain", PROFILES["vllm"], 1.663, (20.2, 38.0, 58.5), marks=pytest.mark.slow),
        pytest.param(
            "chunked_prefill",
            replace(PROFILES["vllm-chunked"], step_coefficients=QUICKER_STEP),
            2.016,
            (21.9, 44.7, 64.4),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_baselines_of_fast25_figures_1_and_8(traces, mode, cost, seconds, shares):
    """As an independent prototype has them: prefill GPU seconds a request, and how many keep a TBT of 0.1, 0.2, 0.3 s
    (in percent).
    """
    config = SimulationConfig(
        327_680, 80, coupled=16, coupled_mode=mode, policy="load-balancing", admission="none", drop_over=131_072
    )
    gc.disable()  # millions of objects, and no cycles of them
    try:
        run = simulate(config, cost, keyed_requests(read_trace(traces / "conversation_trace.jsonl")))
    finally:
        gc.enable()
    assert run.hardware["prefill_compute_s_mean"] == pytest.approx(seconds, rel=0.05)
    kept = [sum(attained(outcome, SLO(30.0, tbt)) for outcome in run.outcomes) for tbt in (0.1, 0.2, 0.3)]
    assert [100 * count / len(run.outcomes) for count in kept] == pytest.approx(shares, abs=3.0)
