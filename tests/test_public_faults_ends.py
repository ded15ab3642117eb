"""Kinds of fault that KVCache stores in use have shipped, each with a test named after it: pins, slots and endings.

Where a kind is a matter of real ranks, its test lies with the others of that sort; ELSEWHERE says where.
"""

import ast
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.strategies import integers
from pool_blocks import landed
from ssd_blocks import file_of, key, opened, put, read
from virtual_cluster import VirtualCluster, make_actors, make_request
from virtual_cluster import run as run_virtual

from mooncake_jax.cache.pool import DRAM, Cause, KVCachePool
from mooncake_jax.cache.ssd import Status
from mooncake_jax.request import COMPLETED
from mooncake_jax.sched.messages import CONDUCTOR, NodeLost
from mooncake_jax.sched.serve import serve

ELSEWHERE = [  # kind, file, test
    (
        "a sick owner stays in the directory",
        "cluster_replay",
        "requests_of_a_dead_prefill_instance_are_served_by_the_other",
    ),
    ("a transfer ends with an exception", "cluster_replay", "without_its_decoding_instance_the_run_ends_with_reasons"),
    ("the other side dies", "cache_messenger", "a_dead_peer_is_reported_once_and_the_others_go_on"),
    ("the index is lost", "cluster_ssd", "an_earlier_runs_blocks_are_found_and_give_the_same_tokens"),
    ("a writer is killed", "cache_ssd_long", "a_writer_killed_at_any_time_leaves_whole_blocks_only"),
]


@pytest.mark.parametrize(("kind", "file", "name"), ELSEWHERE)
def test_what_lies_elsewhere_is_there(kind, file, name):
    tree = ast.parse((Path(__file__).parent / f"test_{file}.py").read_text())
    assert f"test_{name}" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, kind


def test_22_pins_that_are_never_released():
    """Requests end in every way between their match and their use; then nothing is pinned."""
    rng = random.Random(22)
    prefix = [rng.randrange(1000) for _ in range(64)]
    requests = [
        make_request(i, prefix + [rng.randrange(1000) for _ in range(200)], arrival=0.05 * i) for i in range(30)
    ]
    for timeout in (0.2, 1.0, 1e6):
        cluster = run_virtual(make_actors(slots=40, ssd=60, timeout=timeout), requests, failing={"3", "4"})
        assert len(cluster.outcomes) == 30
    pool = KVCachePool({"p0": 2})
    blocks = landed(pool, "p0", [key(1)])
    with pytest.raises(ValueError, match="is not pinned"):
        pool.release("p0", blocks)  # nobody's pin is taken away unnoticed


class Slots(RuleBasedStateMachine):
    """No order of calls frees a slot twice or loses one."""

    def __init__(self):
        super().__init__()
        self.pool = KVCachePool({"p0": 6, "p1": 3}, ssd={"p0": 5})
        self.held, self.writing = [], []

    @rule(chain=integers(0, 3), length=integers(0, 5), node=integers(0, 1))
    def reserve(self, chain, length, node):
        keys = [key(10 * chain + place) for place in range(length)]
        self.held.append((f"p{node}", self.pool.reserve(f"p{node}", keys)))

    @precondition(lambda self: self.held)
    @rule(place=integers(0, 99), land=integers(0, 5), lose=integers(0, 2))
    def release(self, place, land, lose):
        node, blocks = self.held.pop(place % len(self.held))
        self.pool.land(node, blocks[:land])
        self.pool.lose(node, blocks[:lose])
        self._write(node, self.pool.write_behind(node, blocks))
        self.pool.release(node, blocks)

    @precondition(lambda self: self.writing)
    @rule(place=integers(0, 99), stored=integers(0, 5))
    def written(self, place, stored):
        node, blocks = self.writing.pop(place % len(self.writing))
        self._write(node, self.pool.written(node, blocks, [b.key for b in blocks[:stored]]))

    def _write(self, node, write):
        if write.blocks:
            self.writing.append((node, write.blocks))

    @invariant()
    def sound(self):
        self.pool.check()
        pins = sum(len(blocks) for _, blocks in self.held) + 2 * sum(len(blocks) for _, blocks in self.writing)
        assert self.pool.pins() == pins


Slots.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
Test23SlotsAreFreedTwice = Slots.TestCase


@pytest.mark.parametrize("eviction", ["lru", "lfu", "length"])
def test_24_a_prefix_is_evicted_and_its_suffix_kept(eviction):
    rng, pool = random.Random(24), KVCachePool({"p0": 30}, eviction)
    chains = [[key(100 * chain + place) for place in range(10)] for chain in range(12)]
    for _ in range(3000):
        landed(pool, "p0", rng.choice(chains)[: rng.randrange(1, 11)])
        for chain in chains:
            found = [bool(pool.holders(k)) for k in chain]
            assert found == sorted(found, reverse=True), "a block without its parent is found by nobody"


def test_25_a_request_waits_for_ever_for_a_dead_peer():
    """Every instance dies once in the middle of things; every request ends."""
    rng = random.Random(25)
    requests = [make_request(i, [rng.randrange(1000) for _ in range(150)], arrival=0.02 * i) for i in range(25)]
    for node in ("prefill0", "prefill1", "decode0"):
        for at in (0.05, 0.3, 0.8):
            actors = make_actors(prefill=2, decode=2, ssd=40)
            cluster = VirtualCluster(actors, requests)
            cluster.push(at, CONDUCTOR, NodeLost(node))
            cluster.dead.add(node)
            serve(actors, cluster)
            assert len(cluster.outcomes) == 25
            assert not actors[CONDUCTOR].attempts and not actors[CONDUCTOR].reservations.writing


def test_26_hits_are_counted_twice():
    rng = random.Random(26)
    prompt = [rng.randrange(1000) for _ in range(160)]  # ten blocks
    requests = [make_request(i, prompt, arrival=10.0 * i) for i in range(4)]
    actors = make_actors(prefill=1)
    cluster = run_virtual(actors, requests)
    assert [cluster.outcomes[str(i)].reused_tokens for i in range(4)] == [0, 159, 159, 159]
    assert actors[CONDUCTOR].view.pool.counts == {(DRAM, Cause.LANDED): 10}
    assert [o.status for o in cluster.outcomes.values()] == [COMPLETED] * 4


def test_27_missing_empty_and_failed_are_one_answer(tmp_path):
    with opened(tmp_path) as store:
        put(store, 1, 2, 3)
        file_of(tmp_path, 1).write_bytes(b"")
        file_of(tmp_path, 2).unlink()
        statuses = {number: read(store, number)[0].status for number in (1, 2, 3, 4)}
        assert statuses == {1: Status.DAMAGED, 2: Status.MISSING, 3: Status.DONE, 4: Status.MISSING}
        shutil.rmtree(file_of(tmp_path, 3).parent)
        assert read(store, 3)[0].status is Status.FAILED
