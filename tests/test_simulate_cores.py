"""Instances that share the cores of one machine: shares by hand, times by hand, and nothing lost."""

import pytest
from simulated import COST, LAYERS, RATE, make_request, outcomes, random_requests

from mooncake_jax.simulate.cores import Cores, fair_shares
from mooncake_jax.simulate.events import Events

LAST_LAYER = 1 / RATE / LAYERS * 1000  # seconds a token: its KVCache of one layer on the way


@pytest.mark.parametrize(
    ("wanted", "count", "shares"),
    [
        ([1.5], 2, [1.5]),
        ([2, 2], 2, [1, 1]),
        ([0.5, 2], 2, [0.5, 1.5]),
        ([2, 0.5, 2], 2, [0.75, 0.5, 0.75]),
        ([1, 1], 4, [1, 1]),
        ([], 2, []),
    ],
)
def test_cores_are_shared_max_min_fairly(wanted, count, shares):
    assert fair_shares(wanted, count) == shares


def test_one_that_comes_later_slows_what_runs():
    events, ends = Events(), {}
    cores = Cores(events, 2)
    cores.run(4.0, 2, 0.0, lambda now: ends.update(first=now))
    events.at(1.0, lambda value, now: cores.run(1.0, 2, now, lambda now: ends.update(second=now)), None)
    assert events.advance() is None
    # From 1 s on each has half: the second takes 2 s instead of 1, and the first 2 s longer than alone, less that.
    assert ends == {"second": 3.0, "first": 5.0}
    assert cores.idle and cores.busy == 10.0


def test_one_that_wants_little_slows_nobody_who_leaves_it_enough():
    events, ends = Events(), {}
    cores = Cores(events, 2)
    cores.run(4.0, 1.5, 0.0, lambda now: ends.update(big=now))
    cores.run(4.0, 0.5, 0.0, lambda now: ends.update(small=now))
    events.advance()
    assert ends == {"big": 4.0, "small": 4.0}


def test_a_request_alone_takes_what_the_cost_model_says():
    tokens, output = 100, 5
    alone = outcomes([make_request("a", tokens, output=output)], cores=2.0)["a"]
    seconds = COST.prefill(tokens, 0) + LAST_LAYER * tokens + COST.load(tokens * 1000)
    assert alone.ttft_s == pytest.approx(seconds)
    steps = [COST.step(1, tokens + produced) for produced in range(1, output)]
    assert alone.tbt_mean_s == pytest.approx(sum(steps) / len(steps))


def test_who_joins_waits_for_the_step_under_way_and_steps_go_by_the_longest_context():
    short, long = make_request("short", 100, output=40), make_request("long", 400, output=3)
    served = outcomes([short, long], cores=64.0, prefill_cores=2.0, step_cores=2.0, policy="round-robin")
    joins = served["long"].ttft_s
    arrived = COST.prefill(400, 0) + LAST_LAYER * 400 + COST.load(400 * 1000)
    ends = [served["short"].ttft_s]
    while ends[-1] < arrived:
        ends.append(ends[-1] + COST.step(1, 100 + len(ends)))
    assert joins == pytest.approx(ends[-1]) and arrived < joins < arrived + COST.step(1, 140)
    steps = [COST.step(1, 100 + len(ends))]  # has been asked for when it joins
    steps += [COST.step(2, 2 * (400 + produced)) for produced in (1, 2)]
    assert served["long"].tbt_mean_s == pytest.approx(sum(steps) / 2)


def test_two_prefills_at_once_take_twice_as_long_on_cores_that_one_fills():
    requests = [make_request("a", 100, output=1), make_request("b", 100, output=1)]
    policy = {"policy": "round-robin", "cores": 2.0, "prefill_cores": 2.0, "step_cores": 1.0}
    apart, shared = outcomes(requests[:1], **policy)["a"], outcomes(requests, **policy)
    longer = {name: outcome.ttft_s - apart.ttft_s for name, outcome in shared.items()}
    assert longer["a"] >= COST.prefill(100, 0) * 0.999 and longer["b"] >= COST.prefill(100, 0) * 0.999
    roomy = outcomes(requests, **policy | {"cores": 4.0})
    assert max(o.ttft_s for o in roomy.values()) < max(o.ttft_s for o in shared.values())


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_and_more_cores_are_never_slower_on_the_whole(seed):
    requests = random_requests(seed, 40)
    ends = []
    for cores in (1.0, 2.0, 64.0):
        served = outcomes(requests, cores=cores, prefill_cores=1.8, step_cores=1.2)
        assert {outcome.status for outcome in served.values()} == {"completed"}
        ends.append(sum(outcome.ttft_s for outcome in served.values()))
    assert ends == sorted(ends, reverse=True)


def test_inlined_prefills_and_steps_take_turns():
    roomy = {
        "cores": 8.0,
        "prefill_cores": 2.0,
        "step_cores": 2.0,
        "prefill": 1,
        "inline_prefill": True,
        "tbt_slo": 1.0,
    }
    served = outcomes([make_request(name, 100, output=5) for name in "abcd"], **roomy)
    prefill, step = COST.prefill_compute(100, 0), COST.step(1, 101)
    ttft = {name: outcome.ttft_s for name, outcome in served.items() if outcome.prefill_instance == "decode0"}
    assert ttft == {"a": pytest.approx(prefill), "d": pytest.approx(2 * prefill + step)}
