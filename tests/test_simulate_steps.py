"""Many decoding steps told at once against one event a step: the same decisions, the same times to the bit."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import COST, by_id, make_config, make_request, random_requests

from mooncake_jax.sched.actions import RunStep
from mooncake_jax.sched.cost import PolynomialCost
from mooncake_jax.sched.cost_table import TableCost
from mooncake_jax.sched.messages import StepsDone
from mooncake_jax.sched.profiles import PROFILES
from mooncake_jax.simulate.config import SimulationConfig
from mooncake_jax.simulate.decoding_hardware import step_ends
from mooncake_jax.simulate.run import simulate
from mooncake_jax.simulate.traces import keyed_requests
from mooncake_jax.workload.trace import read_trace

ADMISSIONS = ("none", "baseline", "slo", "early", "early-predicted", "request-level")


def both(config, cost, requests):
    single = {**{name: getattr(config, name) for name in config.__dataclass_fields__}, "single_steps": True}
    return simulate(config, cost, requests), simulate(SimulationConfig(**single), cost, requests)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 40),
    rate=st.sampled_from([1.0, 8.0, 60.0]),
    admission=st.sampled_from(ADMISSIONS),
    decode=st.integers(1, 3),
    max_batch=st.integers(1, 6),
    tbt_slo=st.sampled_from([0.0125, 0.014, 1.0]),
    timeout=st.sampled_from([float("inf"), 1.0]),
)
def test_skipping_changes_nothing(seed, count, rate, admission, decode, max_batch, tbt_slo, timeout):
    config = make_config(
        admission=admission,
        decode=decode,
        max_batch=max_batch,
        tbt_slo=tbt_slo,
        ttft_slo=2.0,
        request_timeout=timeout,
        ssd=30,
    )
    skipping, single = both(config, COST, random_requests(seed, count, rate))
    assert by_id(skipping) == by_id(single)
    assert skipping.hardware["decoding_steps"] == single.hardware["decoding_steps"]


# All takes multiples of 1/16 s, and requests come at such: everything happens at the same times as something else.
ROUND = PolynomialCost(
    prefill_coefficients=(0.125, 0.0, 0.0),
    step_coefficients=(0.0625, 0.0, 0.0),
    transfer_coefficients=(0.0, 0.0),
    ssd_read_coefficients=(0.125, 0.0),
    ssd_write_coefficients=(0.125, 0.0),
)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 40),
    admission=st.sampled_from(ADMISSIONS),
    roles=st.sampled_from(({}, {"inline_prefill": True}, {"elastic_roles": True}, {"coupled": 2})),
    max_batch=st.integers(1, 6),
    timeout=st.sampled_from([float("inf"), 1.0]),
)
def test_nor_does_it_where_steps_end_as_something_else_happens(seed, count, admission, roles, max_batch, timeout):
    if "coupled" in roles:
        roles = roles | {"policy": "load-balancing"}
    limits = {"tbt_slo": 0.1, "ttft_slo": 2.0, "max_batch": max_batch, "request_timeout": timeout}
    config = make_config(admission=admission, decode=2, elastic_after_s=0.5, **limits | roles)
    draw, at, requests = random.Random(seed), 0.0, []
    for request in random_requests(seed, count, 1.0):
        requests.append(dataclasses.replace(request, arrival=at))
        at += draw.choice([0.0, 0.0625, 0.125, 0.5])
    skipping, single = both(config, ROUND, requests)
    assert by_id(skipping) == by_id(single)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    seconds=st.sampled_from([1.0, 4.0]),
    admission=st.sampled_from(ADMISSIONS),
    decode=st.integers(1, 3),
    max_batch=st.integers(1, 6),
    tbt_slo=st.sampled_from([0.04, 0.1, 0.25, 1.0, float("inf")]),
    timeout=st.sampled_from([float("inf"), 1.0]),
    decision_s=st.sampled_from([0.0, 0.05]),
)
def test_skipping_changes_nothing_where_prefills_are_inlined(seed, seconds, **options):
    rng = random.Random(seed)
    arrivals = sorted(rng.uniform(0, seconds) for _ in range(50))
    requests = [
        make_request(n, rng.choice([3, 20, 60, 150, 300]), at, rng.randint(1, 30)) for n, at in enumerate(arrivals)
    ]
    timeout = options.pop("timeout")
    config = make_config(
        inline_prefill=True, prefill_chunk=200, ttft_slo=2.0, request_timeout=timeout, ssd=30, **options
    )
    skipping, single = both(config, COST, requests)
    assert by_id(skipping) == by_id(single)
    assert skipping.inlined_prefills == single.inlined_prefills
    assert skipping.hardware["decoding_steps"] == single.hardware["decoding_steps"]


def test_skipping_changes_nothing_with_any_cost_model():
    rows = ((1, ((100, 0.01), (1000, 0.02))), (8, ((100, 0.02), (1000, 0.03))))
    links = [(0.0, 1e-9)] * 2 + [(1e-3, 1e-9)] * 3
    table = TableCost(((0, ((10, 0.1), (1000, 0.5))),), rows, *links)
    skipping, single = both(make_config(), table, random_requests(7, 60))
    assert by_id(skipping) == by_id(single)


@pytest.mark.parametrize("count", [1, 2, 300])
def test_ends_of_steps_are_those_of_one_after_another(count):
    class Other:
        step = COST.step

    now, context, expected = 1.5, 700, []
    for _ in range(count):
        now += COST.step(3, context)
        context += 3
        expected.append(now)
    assert step_ends(COST, 3, 700, 1.5, count) == expected
    assert step_ends(Other, 3, 700, 1.5, count) == expected
    assert type(COST) is PolynomialCost


def test_a_look_at_steps_under_way_has_no_step_asked_for():
    """Whatever arrives has Conductor look, and is rejected: the device goes on with what it was told to do."""
    handled = []

    class Watched:
        def __init__(self, actor):
            self._actor = actor

        def handle(self, message, now):
            actions = self._actor.handle(message, now)
            if isinstance(message, StepsDone):
                handled.append((message.more, [type(action) for action in actions].count(RunStep)))
            return actions

        def __getattr__(self, name):
            return getattr(self._actor, name)

    requests = [make_request("a", 60, 0.0, 200), *(make_request(n, 300, 0.5 + 0.1 * n) for n in range(10))]
    config = make_config(admission="none", drop_over=100)
    simulate(config, COST, requests, host=lambda node, actor: Watched(actor) if node == "decode0" else actor)
    assert handled == [(True, 0)] * 10 + [(False, 0)]


@pytest.mark.traces
def test_skipping_changes_nothing_on_two_thousand_requests_of_the_trace(traces):
    requests = keyed_requests(read_trace(traces / "conversation_trace.jsonl", 2000))
    config = SimulationConfig(327_680, 80, admission="early-predicted", ttft_slo=30.0, tbt_slo=0.1, decision_s=0.05)
    skipping, single = both(config, PROFILES["fast25"], requests)
    assert by_id(skipping) == by_id(single)
