"""Conductor and the instances together, in virtual time: endings, reuse, migration, rejection, failures."""

import random

import pytest
from virtual_cluster import BLOCK, COST, VirtualCluster, make_actors, make_request, run

from mooncake_jax.cache.pool import DRAM, SSD, Cause
from mooncake_jax.request import COMPLETED, FAILED, REJECTED, SLO
from mooncake_jax.sched.actions import FetchBlocks, RunPrefill, Send
from mooncake_jax.sched.decoding import DecodingLimits
from mooncake_jax.sched.messages import CONDUCTOR, Cancel, Interrupted, NodeLost
from mooncake_jax.sched.serve import serve

ROOMY = DecodingLimits(max_batch=4, pages=1000, page_size=BLOCK)


def ids(seed, length):
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


def test_one_request_completes_with_its_latencies():
    outcome = run(make_actors(), [make_request("a", ids(0, 40), arrival=1.0)]).outcomes["a"]
    assert (outcome.status, outcome.reason, outcome.output_tokens, outcome.reused_tokens) == (COMPLETED, None, 4, 0)
    assert outcome.token_ids == (5, 7, 7, 7)
    assert outcome.ttft_s == pytest.approx(COST.prefill(40, 0) + 0.001)
    assert outcome.tbt_mean_s == pytest.approx(COST.step(1, 0))
    assert (outcome.prefill_instance, outcome.decoding_instance) == ("prefill0", "decode0")


@pytest.mark.parametrize(("length", "reused"), [(40, 32), (48, 47), (33, 32), (15, 0), (16, 15)])
def test_a_repeated_prompt_reuses_full_blocks_and_never_its_last_token(length, reused):
    prompt = ids(1, length)
    outcomes = run(make_actors(), [make_request("a", prompt), make_request("b", prompt, arrival=100.0)]).outcomes
    assert outcomes["b"].reused_tokens == reused
    assert outcomes["b"].prefill_instance == outcomes["a"].prefill_instance


def test_the_prefix_is_matched_again_when_the_prefill_starts():
    """b is dispatched while a still computes their shared prefix; a's blocks are there once b starts."""
    prompt = ids(2, 200)
    requests = [make_request("a", prompt), make_request("b", prompt + ids(3, 20), arrival=0.001)]
    outcome = run(make_actors(prefill=1), requests).outcomes["b"]
    assert outcome.reused_tokens == 192


def test_hot_blocks_migrate_to_an_idle_instance():
    """prefill0 holds the prefix but is busy: copying it to prefill1 beats waiting and beats computing."""
    prefix = ids(4, 480)
    requests = [
        make_request("seed", prefix),
        make_request("busy", ids(5, 3000), arrival=10.0),
        make_request("busy2", prefix + ids(6, 2500), arrival=10.001),
        make_request("hot", prefix + ids(7, 30), arrival=10.002),
        make_request("after", prefix + ids(8, 30), arrival=100.0),
    ]
    actors = make_actors(slots=1000, limits=ROOMY)
    cluster = run(actors, requests)
    assert any(type(m).__name__ == "BlocksReplicated" for _, _, m in cluster.log)
    assert {outcome.status for outcome in cluster.outcomes.values()} == {COMPLETED}
    assert cluster.outcomes["hot"].reused_tokens == 480
    assert actors[CONDUCTOR].view.pool.match(requests[0].block_keys) == {"prefill0": 30, "prefill1": 30}


def test_what_leaves_dram_is_read_back_from_the_ssd():
    prompt = ids(20, 160)
    requests = [
        make_request("a", prompt),
        make_request("others", ids(21, 190), arrival=10.0),  # takes all of DRAM
        make_request("again", prompt, arrival=20.0),
    ]
    actors = make_actors(prefill=1, slots=12, ssd=100)
    cluster = run(actors, requests)
    assert cluster.outcomes["again"].reused_tokens == 159
    assert actors[CONDUCTOR].view.pool.counts[SSD, Cause.LANDED] == 10 + 11
    assert actors[CONDUCTOR].view.pool.counts[DRAM, Cause.PROMOTED] >= 9


def test_blocks_of_an_earlier_run_are_found():
    prompt, ssd = ids(22, 160), {}
    run(make_actors(prefill=1, ssd=100), [make_request("a", prompt)], ssd=ssd)
    assert len(ssd["prefill0"]) == 10
    later = run(make_actors(prefill=1, ssd=100), [make_request("b", prompt, arrival=1.0)], ssd=ssd)
    assert later.outcomes["b"].reused_tokens == 159


def test_a_damaged_block_on_the_ssd_is_computed_again_and_stays_away():
    prompt, ssd = ids(22, 160), {}
    run(make_actors(prefill=1, ssd=100), [make_request("a", prompt)], ssd=ssd)
    damaged = make_request("b", prompt, arrival=1.0).block_keys[4]
    actors = make_actors(prefill=1, ssd=100)
    later = run(actors, [make_request("b", prompt, arrival=1.0)], ssd=ssd, damaged={damaged})
    assert (later.outcomes["b"].status, later.outcomes["b"].reused_tokens) == (COMPLETED, 64)
    assert actors[CONDUCTOR].view.pool.counts[SSD, Cause.UNREADABLE] == 1
    assert damaged not in ssd["prefill0"], "nor could it be written anew"


def test_slo_rejects_on_arrival_with_the_estimate():
    outcomes = run(make_actors(prefill=1, slo=SLO(ttft=0.5)), [make_request("a", ids(9, 900))]).outcomes
    assert outcomes["a"].status == REJECTED
    assert outcomes["a"].reason == "predicted TTFT is above the SLO"
    assert (outcomes["a"].estimate, outcomes["a"].limit) == (COST.prefill(900, 0), 0.5)
    tight = SLO(tbt=0.001)
    assert "predicted TBT" in run(make_actors(slo=tight), [make_request("a", ids(9, 90))]).outcomes["a"].reason


def test_a_failed_prefill_fails_its_request_alone():
    requests = [make_request(i, ids(i, 64), arrival=0.01 * i) for i in range(4)]
    outcomes = run(make_actors(), requests, failing={"2"}).outcomes
    assert {i: o.status for i, o in outcomes.items()} == {"0": COMPLETED, "1": COMPLETED, "2": FAILED, "3": COMPLETED}
    assert "made to fail" in outcomes["2"].reason


def test_a_prefill_that_finds_a_block_damaged_as_it_loads_it_is_done_again():
    prompt = ids(23, 160)
    requests = [make_request(i, prompt, arrival=5.0 * i) for i in range(3)]
    cluster = run(make_actors(), requests, rotting={"1"})
    assert [o.status for o in cluster.outcomes.values()] == [COMPLETED] * 3
    assert cluster.outcomes["1"].token_ids == cluster.outcomes["0"].token_ids
    assert not any(cluster.held.get(node) for node in cluster.held)


def test_an_expired_request_fails_once_and_frees_everything():
    requests = [make_request(i, ids(i, 900)) for i in range(6)]
    outcomes = run(make_actors(prefill=1, timeout=2.0), requests).outcomes
    reasons = [o.reason for o in outcomes.values() if o.status == FAILED]
    assert reasons and set(reasons) == {"not finished within 2 s"}
    assert len(outcomes) == 6


def test_requests_wait_for_decoding_memory_and_slots():
    limits = DecodingLimits(max_batch=2, pages=8, page_size=BLOCK)
    requests = [make_request(i, ids(i, 60), output_length=20) for i in range(9)]  # 5 pages each: one at a time
    outcomes = run(make_actors(limits=limits), requests).outcomes
    assert [o.status for o in outcomes.values()] == [COMPLETED] * 9


def test_a_request_larger_than_the_decoding_memory_fails_alone():
    requests = [make_request("large", ids(1, 1200)), make_request("small", ids(2, 50), arrival=0.1)]
    outcomes = run(make_actors(), requests).outcomes
    assert outcomes["large"].reason == "decode0: needs 76 pages, of which there are 64"
    assert outcomes["small"].status == COMPLETED


def test_stop_ids_end_a_request_unless_it_ignores_them():
    limits = DecodingLimits(4, 64, BLOCK, stop_ids=frozenset({7}))
    assert run(make_actors(limits=limits), [make_request("a", ids(0, 20))]).outcomes["a"].token_ids == (5, 7)


def lose(node, at, requests, **options):
    actors = make_actors(**{"prefill": 2, "decode": 2} | options)
    cluster = VirtualCluster(actors, requests)
    cluster.push(at, CONDUCTOR, NodeLost(node))
    plain_next = cluster.next_event

    def next_event():
        event = plain_next()
        if event is not None and isinstance(event[2], NodeLost):
            cluster.dead.add(node)
            del cluster.actors[node]
        return event

    cluster.next_event = next_event
    serve({**actors}, cluster)
    assert not actors[CONDUCTOR].attempts
    assert actors[CONDUCTOR].view.pool.pins() == 0
    return cluster.outcomes


def test_requests_of_a_lost_prefill_instance_are_prefilled_elsewhere():
    requests = [make_request(i, ids(i, 400)) for i in range(6)]
    outcomes = lose("prefill0", 0.5, requests)
    assert [o.status for o in outcomes.values()] == [COMPLETED] * 6
    assert sum(o.prefill_instance == "prefill1" for o in outcomes.values()) >= 5


def test_a_request_whose_blocks_were_coming_from_a_lost_instance_computes_them():
    actors = make_actors(slots=1000, limits=ROOMY)
    prefix = ids(4, 480)
    requests = [
        make_request("seed", prefix),
        make_request("busy", ids(5, 3000), arrival=10.0),
        make_request("hot", prefix + ids(7, 30), arrival=10.002),
    ]
    cluster = VirtualCluster(actors, requests)
    copies = []

    def perform(node, action, now, plain=cluster.perform):
        if isinstance(action, FetchBlocks):  # the source dies instead of sending
            copies.append(action)
            cluster.dead.add(action.replication.source)
            cluster.push(now + 0.01, CONDUCTOR, NodeLost(action.replication.source))
        else:
            plain(node, action, now)

    cluster.perform = perform
    serve(actors, cluster)
    assert len(copies) == 1
    assert cluster.outcomes["hot"].reason is None
    assert (cluster.outcomes["hot"].status, cluster.outcomes["hot"].reused_tokens) == (COMPLETED, 0)
    assert len(cluster.outcomes) == 3
    assert actors[CONDUCTOR].view.pool.pins() == 0
    assert not actors[CONDUCTOR].attempts


def test_requests_decoding_on_a_lost_instance_fail_and_the_others_go_on():
    requests = [make_request(i, ids(i, 100), output_length=200) for i in range(6)]
    outcomes = lose("decode0", 1.0, requests)
    assert len(outcomes) == 6
    assert {o.reason for o in outcomes.values() if o.status == FAILED} == {"decode0 is lost"}
    assert all(o.decoding_instance == "decode1" for o in outcomes.values() if o.status == COMPLETED)
    assert {o.status for o in outcomes.values()} == {COMPLETED, FAILED}


@pytest.mark.parametrize(("node", "kind"), [("prefill0", "prefill"), ("decode0", "decoding")])
def test_without_instances_requests_fail(node, kind):
    """Those that were under way, and those that arrive later."""
    requests = [make_request(i, ids(i, 400), arrival=0.2 * i) for i in range(10)]
    outcomes = lose(node, 0.9, requests, prefill=1, decode=1)
    assert len(outcomes) == 10
    assert {o.status for o in outcomes.values()} == {COMPLETED, FAILED}
    assert {o.reason for o in outcomes.values() if o.status == FAILED} >= {f"no {kind} instance is alive"}
    assert {o.status for name, o in outcomes.items() if int(name) >= 5} == {FAILED}


def test_an_interrupt_ends_all_open_requests():
    actors = make_actors()
    cluster = VirtualCluster(actors, [make_request(i, ids(i, 400)) for i in range(5)])
    cluster.push(0.5, CONDUCTOR, Interrupted())
    serve(actors, cluster)
    assert len(cluster.outcomes) == 5
    assert {o.reason for o in cluster.outcomes.values() if o.status == FAILED} == {"the run was interrupted"}


def test_a_cancelled_request_leaves_the_queue():
    actors = make_actors(prefill=1)
    prefill = actors["prefill0"]
    cluster = VirtualCluster(actors, [make_request(i, ids(i, 400)) for i in range(2)])
    for _ in range(4):
        now, node, message = cluster.next_event()
        for action in actors[node].handle(message, now):
            cluster.perform(node, action, now)
    [waiting] = prefill.queue
    [answer] = prefill.handle(Cancel(waiting.dispatch), 0.0)
    assert isinstance(answer, Send) and answer.message.reason == "cancelled"
    assert not prefill.queue


def test_a_pipeline_is_kept_full_and_no_block_is_written_twice():
    prefix = ids(3, 64)
    actors = make_actors(prefill=1, stages=2)
    cluster = VirtualCluster(actors, [make_request(i, prefix + ids(i, 400)) for i in range(5)])
    runs = []

    def perform(node, action, now, plain=cluster.perform):
        if isinstance(action, RunPrefill):
            runs.append((now, action))
        plain(node, action, now)

    cluster.perform = perform
    serve(actors, cluster)
    assert [now for now, _ in runs[:3]] == [0.0] * 3, "two stages, and one at the entrance"
    assert runs[3][0] > 0.0
    written = [run.blocks[i].slot for _, run in runs[:3] for i in run.missing]
    assert len(written) == len(set(written))
    assert [run.reuse for _, run in runs] == [0, 0, 0, 4, 4]
    assert [o.status for o in cluster.outcomes.values()] == [COMPLETED] * 5


@pytest.mark.parametrize("seed", range(12))
def test_random_workloads_end_every_request_exactly_once(seed):
    rng = random.Random(seed)
    prefixes = [ids(100 + i, rng.randrange(16, 400)) for i in range(4)]
    requests, at = [], 0.0
    for i in range(60):
        at += rng.expovariate(8)
        prompt = rng.choice(prefixes) + ids(1000 + i, rng.randrange(1, 120))
        requests.append(make_request(i, prompt, arrival=at, output_length=rng.randrange(1, 30)))
    options = {
        "prefill": rng.randrange(1, 5),
        "decode": rng.randrange(1, 3),
        "slots": rng.choice([4, 16, 64, 500]),
        "ssd": rng.choice([0, 6, 40, 1000]),
        "threshold": rng.choice([1.1, 2.0, 8.0]),
        "slo": rng.choice([SLO(), SLO(ttft=2.0), SLO(tbt=COST.step(2, 300))]),
        "decoding_cost": rng.choice([None, COST]),
        "timeout": rng.choice([1e6, 3.0]),
        "limits": DecodingLimits(rng.randrange(1, 5), 40, BLOCK),
        "stages": rng.choice([1, 2, 4]),
    }
    damaged = {request.block_keys[-1] for request in requests[::7] if request.block_keys}
    cluster = run(make_actors(**options), requests, failing={str(i) for i in range(0, 60, 13)}, damaged=damaged)
    assert len(cluster.outcomes) == 60
    assert not any(cluster.held.get(node) for node in cluster.held)


class Recording:
    def __init__(self, actor):
        self.actor, self.record = actor, []
        self.check = actor.check

    def handle(self, message, now):
        actions = self.actor.handle(message, now)
        self.record.append((message, now, actions))
        return actions


@pytest.mark.parametrize("seed", range(4))
def test_recorded_messages_replayed_to_fresh_actors_give_the_same_actions(seed):
    prefixes = [ids(seed, 200), ids(seed + 50, 300)]
    requests = [make_request(i, prefixes[i % 2] + ids(i, 40), arrival=0.05 * i) for i in range(40)]
    recorded = {node: Recording(actor) for node, actor in make_actors(slots=40).items()}
    serve(recorded, VirtualCluster(recorded, requests))
    fresh = make_actors(slots=40)
    for node, actor in recorded.items():
        assert actor.record
        for message, now, actions in actor.record:
            assert fresh[node].handle(message, now) == actions
