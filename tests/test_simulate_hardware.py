"""What each part of the simulated hardware takes, by hand: SSDs, links, NICs, pipelines, and events at one time."""

import math
from dataclasses import replace

import pytest
from simulated import (
    BLOCK,
    BYTES_PER_TOKEN,
    COST,
    LAYERS,
    RATE,
    by_id,
    make_config,
    make_request,
    outcomes,
    random_requests,
)

from mooncake_jax.cache.entry import Block
from mooncake_jax.errors import UsageError
from mooncake_jax.request import COMPLETED, FAILED, REJECTED
from mooncake_jax.sched.actions import FetchBlocks, LoadKVCache, PromoteBlocks, WriteBlocks
from mooncake_jax.sched.cost import PolynomialCost
from mooncake_jax.sched.decisions import Dispatch
from mooncake_jax.sched.messages import Expired, Replication, StoreOnSSD
from mooncake_jax.simulate.cluster import SimulatedCluster
from mooncake_jax.simulate.decoding_hardware import DecodingHardware
from mooncake_jax.simulate.events import Events
from mooncake_jax.simulate.group import GroupCost, PrefillGroup
from mooncake_jax.simulate.network import Network
from mooncake_jax.simulate.run import simulate

BLOCK_BYTES = BLOCK * BYTES_PER_TOKEN
LATENT = replace(COST, transfer_coefficients=(0.5, 1 / RATE))


def blocks(count):
    return tuple(Block(bytes([number]), number) for number in range(count))


def idle_cluster(cost=COST, **changes):
    return SimulatedCluster(make_config(**changes), cost, [], {}, ended=lambda outcome: None)


def times(cluster):
    """When each message comes, until nothing more happens."""
    found = []
    while (event := cluster.next_event()) is not None:
        found.append(event[0])
    return found


def test_events_at_one_time_happen_in_the_order_they_were_asked_for():
    events, order = Events(), []
    events.post(2.0, "late", Expired("late"))
    for name in "abc":
        events.post(1.0, name, Expired(name))
        events.at(1.0, lambda value, now: order.append((value, now)), name)
    while (event := events.advance()) is not None:
        order.append(event[0])
    assert order == ["a", ("a", 1.0), "b", ("b", 1.0), "c", ("c", 1.0), "late"]


@pytest.mark.parametrize("when", [0.5, math.nan])
def test_nothing_happens_before_now(when):
    events = Events()
    events.post(1.0, "a", Expired("a"))
    events.advance()
    for ask in (events.post, events.at):
        with pytest.raises(UsageError, match="--cost: something that begins at 1 s would end at (0.5|nan) s: the cost"):
            ask(when, "b", Expired("b"))


@pytest.mark.parametrize("stages", [1, 4])
def test_an_ssd_reads_one_order_after_another_and_each_node_its_own_layers(stages):
    cluster = idle_cluster(stages=stages)
    for count in (2, 3):
        cluster.prefill["prefill0"].promote(PromoteBlocks(1, blocks(count)), 0.0)
    first, second = (1e-4 + 1e-8 * count * BLOCK_BYTES / stages for count in (2, 3))
    assert times(cluster) == pytest.approx([first, first + second], rel=1e-12)


@pytest.mark.parametrize("stages", [1, 4])
def test_an_ssd_writes_one_order_after_another_beside_what_it_reads(stages):
    cluster = idle_cluster(stages=stages)
    hardware = cluster.prefill["prefill1"]
    for count in (2, 3):
        hardware.write(WriteBlocks(StoreOnSSD(count, blocks(count), (None,) * count, ())), 1.0)
    hardware.promote(PromoteBlocks(1, blocks(1)), 1.0)
    first, second = (1e-4 + 2e-8 * count * BLOCK_BYTES / stages for count in (2, 3))
    read = 1e-4 + 1e-8 * BLOCK_BYTES / stages
    assert times(cluster) == pytest.approx(sorted([1 + read, 1 + first, 1 + first + second]), rel=1e-12)


def test_a_decoding_instance_loads_one_request_after_another():
    cluster = idle_cluster()
    for number, tokens in enumerate((100, 40)):
        cluster.decoding["decode0"].load(LoadKVCache(number, make_request(number, tokens), None), 2.0)
    first, second = 1e-3 + 100_000e-9, 1e-3 + 40_000e-9
    assert times(cluster) == pytest.approx([2 + first, 2 + first + second], rel=1e-12)
    assert cluster.decoding["decode0"].loaded == 140_000


def copy(count, source="prefill0"):
    return FetchBlocks(1, Replication(source, blocks(count), blocks(count)))


@pytest.mark.parametrize(("stages", "cost", "latency"), [(1, COST, 0.0), (4, COST, 0.0), (1, LATENT, 0.5)])
def test_copies_from_one_instance_share_its_nics_one_for_each_node(stages, cost, latency):
    cluster = idle_cluster(cost, prefill=3, stages=stages)
    cluster.prefill["prefill1"].fetch(copy(2), 0.0)
    cluster.prefill["prefill2"].fetch(copy(3), 0.0)
    ends = [latency + count * BLOCK_BYTES / RATE / stages for count in (4, 5)]
    assert times(cluster) == pytest.approx(ends, rel=1e-12)
    assert cluster.network.sent == {"prefill0": 5 * BLOCK_BYTES}


def test_a_transfer_takes_its_latency():
    outcome = outcomes([make_request("a", 40)], cost=LATENT, without=frozenset({"overlap"}))["a"]
    assert outcome.ttft_s == pytest.approx(COST.prefill(40, 0) + 0.5 + 40_000 / RATE + COST.load(40_000), rel=1e-12)


class Copying:
    """The first request and "b" to prefill0; the blocks of "c" are copied from there to prefill1."""

    def choose(self, request, view, now):
        if request.id == "c":
            return Dispatch("prefill1", "decode0", 0.0, 0.0, "prefill0", 10)
        return Dispatch("prefill0", "decode0", 0.0, 0.0)


def test_a_migration_shares_the_senders_nic_with_what_streams_from_there():
    """At 10 s b's 40 kB and a copy of 160 kB leave prefill0 at 1 MB/s: the copy is there after 0.2 s. Then c's KVCache
    takes 0.16 s to the decoding instance, longer than its prefill.
    """
    requests = [make_request(name, 160, at, 1, chain="x", shared=10) for name, at in (("a", 0.0), ("c", 10.0))]
    requests.insert(1, make_request("b", 40, 10.0, 1))
    found = outcomes(requests, policy="test_simulate_hardware:Copying", admission="none", link_bytes_per_s=1e6)
    assert found["c"].reused_tokens == 159
    assert found["c"].ttft_s == pytest.approx(0.2 + 0.16 + COST.load(160_000), rel=1e-9)


@pytest.mark.parametrize(("prefix", "seconds"), [(60, 0.6 + 0.1), (20, 0.8 + 0.1)])
def test_a_prefill_takes_as_long_as_the_slowest_of_computing_loading_and_storing(prefix, seconds):
    """10 us a byte: a token takes 10 ms, ten times what it takes to compute it."""
    slow = replace(COST, load_coefficients=(0.0, 1e-5))
    assert PrefillGroup(make_config(), slow).run(100, prefix, 3.0) == pytest.approx((3.0, 3.0 + seconds), rel=1e-12)


def test_a_pipeline_has_the_memory_of_all_its_nodes_and_all_of_them_are_busy():
    config = make_config(prefill=1, stages=3, dram=12, ssd=7, prefill_chunk=100, without=frozenset({"overlap"}))
    assert (config.dram_blocks, config.ssd_blocks) == (36, 21)
    requests = [make_request(name, 480, at, chain="c", shared=30) for name, at in (("a", 0.0), ("again", 50.0))]
    run = simulate(config, COST, requests, check=True)
    assert by_id(run)["again"].reused_tokens == 479
    share = (COST.prefill(480, 0) + COST.prefill(480, 479)) / 3
    assert run.hardware["prefill_busy_s"] == {"prefill0": pytest.approx([share] * 3, rel=1e-12)}


def test_where_nothing_costs_anything_all_ends_at_once():
    nothing = PolynomialCost((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.0))
    for stages in (1, 3):
        found = outcomes([make_request("a", 300, 1.0)], cost=nothing, stages=stages, prefill_chunk=100)["a"]
        assert (found.status, found.ttft_s, found.tbt_mean_s) == (COMPLETED, 0.0, 0.0)


def test_chunks_that_cost_nothing_to_compute_are_stored_in_turn():
    """Storing takes 0.3 s, a tenth of it beside: three chunks through three stages take 5 of 9 ticks."""
    storing = PolynomialCost((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.0), load_coefficients=(0.0, 1e-6))
    group = PrefillGroup(make_config(stages=3, prefill_chunk=100), storing)
    assert group.run(300, 0, 0.0)[1] == pytest.approx(0.33 * 5 / 9, rel=1e-12)


def test_a_pipelines_latency_is_the_same_on_every_python():
    """Whose sum() of floats is not."""
    group = GroupCost(make_config(stages=3, prefill_chunk=50), COST)
    for tokens in range(300, 1500, 7):
        shares = group.shares(tokens, 0, group.on_node(tokens, 0))
        assert group.prefill(tokens, 0) == math.fsum(shares) + 2 * max(shares)


def test_a_cost_that_is_negative_for_what_is_asked_of_it_is_told():
    backwards = replace(COST, step_coefficients=(0.01, 0.0, -1e-3))
    with pytest.raises(UsageError, match="the cost is negative for what this run asks of it"):
        simulate(make_config(), backwards, [make_request("a", 40)], believed=COST)


def test_conductor_takes_its_time_to_decide_about_prefills_only():
    """A request that expires is cancelled at its decoding instance at once: after the step under way."""
    config = make_config(decision_s=0.5, request_timeout=1.0, admission="none")
    run = simulate(config, COST, [make_request("a", 40, output=500)], check=True)
    [outcome] = run.outcomes
    assert outcome.status == FAILED and outcome.output_tokens > 20
    assert run.hardware["decoding_tokens"]["decode0"] <= outcome.output_tokens


def test_decoding_instances_judge_again_only_where_they_are_to():
    """A step of two takes 12 ms and more."""
    requests = [make_request(name, 40, output=30) for name in "ab"]
    limits = {"admission": "mooncake_jax.sched.admission:NoAdmission", "tbt_slo": 0.0115}
    judged, unjudged = (outcomes(requests, recheck=recheck, **limits) for recheck in (True, False))
    assert sorted(outcome.status for outcome in judged.values()) == [COMPLETED, REJECTED]
    assert {outcome.status for outcome in unjudged.values()} == {COMPLETED}


def test_prefixes_are_matched_again_as_prefills_start_only_where_they_are_to():
    """The second request comes while the first computes what both begin with; the third when that is done."""
    requests = [
        make_request(name, 400, arrival, chain="c", shared=20) for name, arrival in (("a", 0.0), ("b", 0.1), ("c", 9.0))
    ]
    again, once = (outcomes(requests, prefill=1, rematch=rematch) for rematch in (True, False))
    assert [again[name].reused_tokens for name in "abc"] == [0, 20 * BLOCK, 20 * BLOCK]
    assert [once[name].reused_tokens for name in "abc"] == [0, 0, 20 * BLOCK]


@pytest.mark.parametrize("seed", range(3))
def test_without_matching_again_all_invariants_hold(seed):
    requests = random_requests(seed, 60, rate=40.0)
    run = simulate(make_config(rematch=False, ssd=40, request_timeout=3.0), COST, requests, check=True)
    assert len(run.outcomes) == 60


def losing_bytes(monkeypatch):
    def send(self, source, target, nbytes, *rest, real=Network.send):
        real(self, source, target, nbytes - 1, *rest)

    monkeypatch.setattr(Network, "send", send)


def arriving_early(monkeypatch):
    def ending(self, flow, rate, now, real=Network._set):
        flow.left *= 0.5
        real(self, flow, rate, now)

    monkeypatch.setattr(Network, "_set", ending)


def making_a_token(monkeypatch):
    def tell(self, upto, real=DecodingHardware._tell):
        self.tokens += 1
        real(self, upto)

    monkeypatch.setattr(DecodingHardware, "_tell", tell)


def computing_twice(monkeypatch):
    def run(self, *prefill, real=PrefillGroup.run):
        real(self, *prefill)
        return real(self, *prefill)

    monkeypatch.setattr(PrefillGroup, "run", run)


def loading_twice(monkeypatch):
    def load(self, action, now, real=DecodingHardware.load):
        self.loaded += 1
        real(self, action, now)

    monkeypatch.setattr(DecodingHardware, "load", load)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (losing_bytes, "39999 bytes were sent, 40000 were asked for"),
        (arriving_early, "the NICs carried 20000.0 bytes of 40000"),
        (making_a_token, "3 tokens, and 0 at most, came of steps of 4"),
        (computing_twice, "s were computed for prefills of"),
        (loading_twice, "40001 bytes were loaded, 40000 were asked for"),
    ],
)
def test_hardware_that_loses_something_or_makes_it_of_nothing_is_found_out(monkeypatch, fault, told):
    assert LAYERS == 10
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=told):
        outcomes([make_request("a", 40)], check=True)
