"""NICs that transfers share: who gets how much, and when each has arrived."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_jax.simulate.events import Events
from mooncake_jax.simulate.network import Network, fair_rates


def run(network, events):
    while events._heap:
        events.advance()
        network.check()


def arrivals(transfers, rates, **options):
    """Seconds at which each (source, target, bytes, begin) has arrived."""
    events, ends = Events(), {}
    network = Network(events, rates, **options)

    def begin(place, now):
        source, target, nbytes, _ = transfers[place]
        network.send(source, target, nbytes, now, lambda at: ends.__setitem__(place, at))

    for place, transfer in enumerate(transfers):
        events.at(transfer[3], begin, place)
    run(network, events)
    assert network.idle
    return [ends[place] for place in range(len(transfers))]


RATES = {"a": 10.0, "b": 10.0, "c": 4.0, "d": 10.0}


def test_one_alone_has_the_slower_of_both_ends():
    assert arrivals([("a", "b", 100, 0.0)], RATES) == [10.0]
    assert arrivals([("a", "c", 100, 0.0)], RATES, latency=0.5) == [25.5]


def test_two_from_one_sender_share_it_until_one_has_ended():
    assert arrivals([("a", "b", 100, 0.0), ("a", "d", 50, 0.0)], RATES) == [15.0, 10.0]
    assert arrivals([("a", "b", 100, 0.0), ("a", "d", 100, 5.0)], RATES) == [15.0, 20.0]


def test_one_that_is_held_up_elsewhere_leaves_its_share_to_the_other():
    """Into c at most 4, so that 6 are left of a."""
    assert arrivals([("a", "c", 40, 0.0), ("a", "b", 60, 0.0)], RATES) == pytest.approx([10.0, 10.0])


def test_receiving_does_not_slow_sending_down():
    assert arrivals([("a", "b", 100, 0.0), ("b", "a", 100, 0.0)], RATES) == [10.0, 10.0]


def test_without_sharing_each_is_as_if_alone():
    assert arrivals([("a", "b", 100, 0.0), ("a", "b", 100, 0.0)], RATES, shared=False) == [10.0, 10.0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12), st.integers(0, 100))
def test_rates_are_max_min_fair(pairs, seed):
    rng = random.Random(seed)
    capacity = {str(node): rng.uniform(1, 10) for node in range(6)}
    flows = [((str(source), True), (str(target), False)) for source, target in pairs]
    rates = fair_rates(flows, lambda nic: capacity[nic[0]])
    for place, nics in enumerate(flows):
        narrow = False
        for nic in nics:
            sharing = [rate for rate, other in zip(rates, flows) if nic in other]
            assert sum(sharing) <= capacity[nic[0]] * (1 + 1e-9)
            full = sum(sharing) >= capacity[nic[0]] * (1 - 1e-9)
            narrow |= full and rates[place] >= max(sharing) * (1 - 1e-9)
        assert narrow, "it could be faster, and slow down only ones that are faster than itself"


@pytest.mark.parametrize("seed", range(5))
def test_all_bytes_arrive_and_no_link_is_above_its_rate(seed):
    rng = random.Random(seed)
    transfers = [(*rng.sample("abcd", 2), rng.randrange(1, 500), rng.uniform(0, 60)) for _ in range(60)]
    ends = arrivals(transfers, RATES)
    for (source, target, nbytes, begin), end in zip(transfers, ends):
        assert end - begin >= nbytes / min(RATES[source], RATES[target]) * (1 - 1e-9)
    for node in "abcd":
        sent = sum(nbytes for source, _, nbytes, _ in transfers if source == node)
        assert max(ends) * RATES[node] >= sent
