"""A simulation that comes to a stop says which requests wait for what: some node is deaf to one kind of message."""

import pytest
from simulated import COST, make_config, make_request

from mooncake_jax.sched.messages import (
    Arrived,
    BlocksPromoted,
    BlocksReplicated,
    KVCacheLoaded,
    KVCacheReceived,
    PrefillDone,
    PrefillInlined,
    StartPrefill,
    StepDone,
    StepsDone,
)
from mooncake_jax.simulate.run import Stuck, simulate


class Deaf:
    def __init__(self, actor, kinds):
        self._actor, self._kinds = actor, kinds

    def handle(self, message, now):
        return [] if isinstance(message, self._kinds) else self._actor.handle(message, now)


def told(requests, node, kinds, **changes):
    def host(name, actor):
        return Deaf(actor, kinds) if name.startswith(node) else actor

    with pytest.raises(Stuck) as stuck:
        simulate(make_config(prefill=1, **changes), COST, requests, host=host)
    start, _, rest = str(stuck.value).partition(" requests wait: ")
    assert start == f"nothing more happens, and {len(requests)}"
    return rest


SEVEN = [make_request(i, 60, arrival=0.01 * i) for i in range(7)]


@pytest.mark.parametrize(
    ("node", "kinds", "waits"),
    [
        ("conductor", Arrived, "7 for Conductor to dispatch or end them (0, 1, 2, 3, 4, ...)"),
        ("prefill", StartPrefill, "7 for prefill0 to take them on (0, 1, 2, 3, 4, ...)"),
        (
            "",
            (PrefillDone, KVCacheReceived),
            "1 for their prefill at prefill0 to end (0); 6 for their turn at prefill0 (1, 2, 3, 4, 5, ...)",
        ),
        ("decode", KVCacheReceived, "7 for their KVCache to arrive at decode0 (0, 1, 2, 3, 4, ...)"),
        (
            "decode",
            KVCacheLoaded,
            "4 for their KVCache to be loaded at decode0 (0, 1, 2, 3); "
            "3 for room in the batch or the memory of decode0 (4, 5, 6)",
        ),
    ],
)
def test_each_request_is_told_with_what_it_waits_for(node, kinds, waits):
    assert told(SEVEN, node, kinds, decision_s=0.0) == waits


def test_a_step_that_never_ends():
    assert told([make_request("a", 60)], "decode", StepsDone) == "1 for their next token from decode0 (a)"


def test_an_inlined_prefill_that_never_ends():
    waits = told([make_request("a", 60)], "decode", PrefillInlined, inline_prefill=True)
    assert waits == "1 for their prefill at decode0 to end (a)"


def test_blocks_that_never_come_from_the_ssd():
    requests = [
        make_request("a", 160, chain="c", shared=10),
        make_request("others", 190, 100.0),
        make_request("again", 160, 200.0, chain="c", shared=10),
        make_request("behind", 160, 200.1, chain="c", shared=10),
    ]
    with pytest.raises(Stuck) as stuck:
        simulate(
            make_config(prefill=1, dram=12, ssd=100),
            COST,
            requests,
            host=lambda name, actor: Deaf(actor, BlocksPromoted) if name == "prefill0" else actor,
        )
    assert "2 for blocks that prefill0 gets from its SSD (again, behind)" in str(stuck.value)


def test_blocks_that_never_come_from_another_instance():
    requests = [make_request("seed", 1000, chain="c", shared=60, output=1)]
    requests += [make_request(f"hot{i}", 1000, 100.0, chain="c", shared=60, output=1) for i in range(6)]
    with pytest.raises(Stuck) as stuck:
        simulate(
            make_config(prefill=2, dram=200),
            COST,
            requests,
            host=lambda name, actor: Deaf(actor, BlocksReplicated) if name.startswith("prefill") else actor,
        )
    assert "gets from another instance" in str(stuck.value)


@pytest.mark.parametrize(
    ("kinds", "waits"),
    [
        (StartPrefill, "7 for coupled0 to take them on (0, 1, 2, 3, 4, ...)"),
        (StepDone, "1 for their prefill at coupled0 to end (0); 6 for their turn at coupled0 (1, 2, 3, 4, 5, ...)"),
        (
            StepsDone,
            "1 for their next token from coupled0 (0); 6 for their turn at coupled0 (1, 2, 3, 4, 5, ...)",
        ),
    ],
)
def test_at_a_coupled_instance(kinds, waits):
    assert told(SEVEN, "coupled", kinds, coupled=1, policy="random", max_batch=1) == waits
