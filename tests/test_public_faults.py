"""Kinds of fault that KVCache stores in use have shipped, each with a test named after it.

Where a kind is a matter of real ranks, its test runs a cluster and lies with the others of that sort; ELSEWHERE says
where.
"""

import ast
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.strategies import integers
from ssd_blocks import ALL, DONE, LAYOUT, MODEL, ROOMY, assert_readable, block, file_of, key, opened, put, read
from virtual_cluster import VirtualCluster, make_actors, make_request
from virtual_cluster import run as run_virtual

from mooncake_jax.cache.keys import block_keys, root_key
from mooncake_jax.cache.pool import DRAM, Block, Cause, KVCachePool
from mooncake_jax.cache.slots import NotWhole
from mooncake_jax.cache.ssd import SSDStore, Status
from mooncake_jax.cache.ssd_folder import disk_bytes
from mooncake_jax.cache.ssd_format import slot_index
from mooncake_jax.cache.store import BlockStore
from mooncake_jax.model.sources import model_fingerprint
from mooncake_jax.request import COMPLETED
from mooncake_jax.sched.messages import CONDUCTOR, NodeLost
from mooncake_jax.sched.serve import serve

PACKAGE = Path(__file__).parent.parent / "mooncake_jax"
TINY = Path(__file__).parent / "data" / "tiny-llama2"
ROOT = root_key(b"model", 4)

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


def landed(pool, node, keys):
    blocks = pool.reserve(node, keys)
    pool.land(node, blocks)
    pool.release(node, blocks)
    return blocks


# --- keys


def keys_in_another_process(**environment):
    code = "from mooncake_jax.cache.keys import *; print(block_keys(range(16), 4, root_key(b'model', 4))[-1].hex())"
    arguments = dict(env=os.environ | environment, capture_output=True, text=True, check=True, timeout=60)
    return subprocess.run([sys.executable, "-c", code], **arguments).stdout.strip()


def test_01_a_random_seed_of_each_process():
    golden = "3952f5853c7d0f831b1748ac171259f1fc4e2b340f636193f50e719f3529b2d8"
    assert {keys_in_another_process(PYTHONHASHSEED=seed) for seed in ("random", "0", "77")} == {golden}


def test_02_hash_of_none_differs_between_pythons():
    """The builtin hash() is nowhere called."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
            assert called != "hash", f"{path}:{node.lineno}"


def test_03_colliding_hashes_serve_another_tenants_blocks(tmp_path):
    """Keys that share all bits by which the SSD finds a block's slot, and nearly all others."""
    one = key(1)
    other = one[:-1] + bytes([one[-1] ^ 1])
    assert slot_index(one) == slot_index(other)
    with opened(tmp_path) as store:
        put(store, 1)
        out = np.zeros(LAYOUT.shape, np.uint16)
        assert store.read(other, ALL, out).result().status is Status.MISSING
        assert store.put(other, block(2)).result().status is Status.REFUSED
        assert_readable(store, 1)
    pool = KVCachePool({"p0": 4})
    landed(pool, "p0", [one])
    assert (pool.match([other]), pool.holders(other)) == ({"p0": 0}, ())


def test_04_a_collision_reuses_the_wrong_block():
    """A slot that holds another block than the reader wants is no hit, whatever led the reader there."""
    store = BlockStore(1, LAYOUT)
    store.put(Block(key(1), 0), block(1))
    assert store.sound([Block(key(2), 0)]) == 0
    with pytest.raises(NotWhole):
        store.get(Block(key(2), 0), np.empty(LAYOUT.shape, np.uint16))


def test_05_a_polynomial_hash_collides():
    rng = random.Random(5)
    for _ in range(2000):
        ids = [rng.randrange(1, 50_000) for _ in range(8)]
        place, step = rng.randrange(7), rng.choice([1, 31, 33, 65_599, 1 << 16, 1 << 32])
        moved = list(ids)
        moved[place], moved[place + 1] = moved[place] + step, moved[place + 1] - 1
        assert block_keys(ids, 4, ROOT)[-1] != block_keys(moved, 4, ROOT)[-1]


def test_06_other_weights_under_the_same_name(tmp_path):
    changed = tmp_path / TINY.name
    shutil.copytree(TINY, changed)
    shard = sorted(changed.glob("*.safetensors"))[0]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert model_fingerprint(TINY, "float32") != model_fingerprint(changed, "float32")


def test_07_the_key_leaves_out_the_dtype():
    keys = {block_keys(range(4), 4, root_key(model_fingerprint(TINY, dtype), 4)) for dtype in ("float32", "bfloat16")}
    assert len(keys) == 2


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32])
def test_08_two_sides_of_different_dtypes(tmp_path, dtype):
    """Items of another size are refused, not reinterpreted."""
    wrong = np.zeros(LAYOUT.shape, dtype)
    with opened(tmp_path) as store:
        put(store, 1)
        for call in (lambda: store.put(key(2), wrong), lambda: store.read(key(1), ALL, wrong)):
            with pytest.raises(ValueError, match="where the layout has"):
                call()


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (2, 2)])
def test_09_another_tensor_parallelism_reads_another_layout(writers, readers):
    store, whole = BlockStore(1, LAYOUT), block(9)
    gathered = np.concatenate(np.split(whole, writers, axis=3), axis=3)
    store.put(Block(key(9), 0), gathered)
    parts = []
    for part in range(readers):
        width = LAYOUT.kv_heads // readers
        heads = slice(part * width, (part + 1) * width)
        out = np.empty((*LAYOUT.shape[:3], width, LAYOUT.head_dim), np.uint16)
        store.get(Block(key(9), 0), out, heads=heads)
        parts.append(out)
    assert np.array_equal(np.concatenate(parts, axis=3), whole)


def test_10_fields_of_the_key_run_into_one_another():
    swapped = {root_key(b"ab", 4, "cd"), root_key(b"abc", 4, "d"), root_key(b"cd", 4, "ab"), root_key(b"", 4, "abcd")}
    assert len(swapped | {root_key(b"abcd", 4), root_key(b"ab", 4)}) == 6


def test_11_the_salt_is_dropped_on_the_way_to_disk(tmp_path):
    mine, theirs = (block_keys(range(12), 4, root_key(b"model", 4, salt)) for salt in ("mine", "theirs"))
    pool = KVCachePool({"p0": 8}, ssd={"p0": 8})
    blocks = landed(pool, "p0", mine)
    write = pool.write_behind("p0", blocks)
    pool.written("p0", write.blocks, mine)
    assert (pool.match(mine), pool.match(theirs)) == ({"p0": 3}, {"p0": 0})
    with opened(tmp_path) as store:
        assert store.put(mine[0], block(1)).result() == DONE
        assert store.read(theirs[0], ALL, np.zeros(LAYOUT.shape, np.uint16)).result().status is Status.MISSING


@pytest.mark.parametrize(("length", "keys"), [(511, 0), (512, 1), (513, 1), (1023, 1), (1024, 2)])
def test_12_a_partial_last_block_has_a_key(length, keys):
    assert len(block_keys(range(length), 512, ROOT)) == keys


# --- bytes


class Node:
    """One node's pool and both its tiers, with real bytes: what a request reads is what its keys say, or is missing."""

    def __init__(self, folder, slots, ssd_blocks):
        self.pool = KVCachePool({"n": slots}, ssd={"n": ssd_blocks})
        self.dram = BlockStore(slots, LAYOUT)
        self.ssd = SSDStore(folder, LAYOUT, MODEL, ROOMY)
        self.reused = 0

    def serve(self, numbers):
        """A request with these blocks: reuse what is found, verify every byte of it, compute and store the rest."""
        keys = [key(number) for number in numbers]
        blocks = self.pool.reserve("n", keys)
        asked = self.pool.promote("n", blocks)
        loaded = tuple(b for b in asked if self._load(b))
        self._follow(self.pool.promoted("n", asked, loaded))
        found = self.pool.in_dram("n", [b.key for b in blocks])
        for place, b in enumerate(blocks):
            if place < found:
                out = np.empty(LAYOUT.shape, np.uint16)
                self.dram.get(b, out)
                assert np.array_equal(out, block(numbers[place])), "another block's KVCache"
            else:
                self.dram.put(b, block(numbers[place]))
        self.reused += found
        self.pool.land("n", blocks)
        write = self.pool.write_behind("n", blocks)
        self.pool.release("n", blocks)
        self._follow(write)

    def _load(self, b):
        self.dram.claim([b])
        if self.ssd.read(b.key, ALL, self.dram.block(b.slot)).result() != DONE:
            return False
        self.dram.adopt(b, self.ssd.sums(b.key))
        return True

    def _follow(self, write):
        while write.blocks or write.dropped:
            for gone in write.dropped:
                self.ssd.delete(gone).result()
            puts = [self.ssd.put(b.key, self.dram.block(b.slot), p) for b, p in zip(write.blocks, write.parents)]
            stored = [b.key for b, future in zip(write.blocks, puts) if future.result() == DONE]
            write = self.pool.written("n", write.blocks, stored)


def test_13_the_disk_tier_returns_another_requests_kvcache(tmp_path):
    """100 sessions of growing prompts on a DRAM that holds two of them and an SSD that holds ten."""
    rng, node = random.Random(13), Node(tmp_path, 16, 80)
    sessions = [[1000 * session + place for place in range(8)] for session in range(100)]
    for session in sessions:
        session[:3] = [10**6, 10**6 + 1, 10**6 + 2]  # a common system prompt
    for _ in range(400):
        node.serve(rng.choice(sessions[: rng.choice([5, 20, 100])])[: rng.randrange(1, 9)])
    node.pool.check()
    assert node.pool.pins() == 0
    assert {node.pool.counts[DRAM, Cause.PROMOTED] > 100, node.pool.counts[DRAM, Cause.DEMOTED] > 100} == {True}
    assert node.reused > 600
    assert set(node.ssd.keys()) == node.pool._nodes["n"].ssd.entries.keys()
    node.ssd.close()


def test_14_a_slow_read_outlives_its_lease(monkeypatch):
    """A slot is given away while it is read: the read fails, it does not return the new bytes."""
    store = BlockStore(1, LAYOUT)
    store.put(Block(key(1), 0), block(1))
    copyto, given_away = np.copyto, []

    def slowly(*arguments, **options):
        copyto(*arguments, **options)
        if not given_away:
            given_away.append(True)
            store.claim([Block(key(2), 0)])

    monkeypatch.setattr(np, "copyto", slowly)
    with pytest.raises(NotWhole):
        store.get(Block(key(1), 0), np.empty(LAYOUT.shape, np.uint16))
    pool = KVCachePool({"p0": 1})
    reading = pool.reserve("p0", [key(1)])
    pool.land("p0", reading)
    assert pool.reserve("p0", [key(2)]) == (), "and the pool does not give away what is read"


def test_15_a_block_is_evicted_during_its_read_from_disk(tmp_path):
    with opened(tmp_path) as store:
        for turn in range(50):
            put(store, 1)
            out = np.zeros(LAYOUT.shape, np.uint16)
            reading, deleting = store.read(key(1), ALL, out), store.delete(key(1))
            if turn % 2:
                time.sleep(1e-3)
            result = reading.result()
            assert result.status is Status.MISSING or np.array_equal(out, block(1))
            deleting.result()


def test_16_a_source_is_reused_while_it_is_stored(tmp_path):
    """Bytes that are not those of the block's checksums are never written under its key."""
    dram, source = BlockStore(1, LAYOUT), Block(key(1), 0)
    dram.put(source, block(1))
    sums = dram.sums(0)
    dram.put(Block(key(2), 0), block(2))
    with opened(tmp_path) as store:
        assert store.put(key(1), dram.block(0), sums=sums).result().status is Status.DAMAGED
        assert store.keys() == ()


def test_17_a_dead_owner_is_offered_and_accepts_puts():
    pool = KVCachePool({"p0": 4, "p1": 4}, ssd={"p0": 4})
    pool.restore("p0", [(key(2), key(1))])
    blocks = landed(pool, "p0", [key(1)])
    late = pool.reserve("p0", [key(3)])
    pool.drop_node("p0")
    pool.land("p0", late)
    assert pool.match([key(1), key(2)]) == {"p1": 0}
    assert [pool.holders(key(n)) for n in (1, 2, 3)] == [(), (), ()]
    assert pool.written("p0", blocks, [key(1)]).blocks == ()


def test_18_exists_says_yes_and_get_finds_nothing():
    """All that is said of where a block is comes from one predicate."""
    pool = KVCachePool({"p0": 2}, ssd={"p0": 4})
    pool.restore("p0", [(key(1), None)])

    def found(number):
        return pool.match([key(number)])["p0"] == 1, pool.holders(key(number)) == ("p0",)

    assert found(1) == (True, True)
    reading = pool.reserve("p0", [key(1)])
    assert pool.promote("p0", reading) == reading
    pool.promoted("p0", reading, ())
    assert found(1) == (False, False)
    pool.land("p0", reading)
    assert found(1) == (True, True)
    pool.lose("p0", reading)
    assert found(1) == (False, False)


def test_19_the_disk_grows_past_its_limit(tmp_path):
    limit = 40 << 10
    for start in range(0, 60, 20):  # three lives of a node
        with opened(tmp_path, capacity=limit) as store:
            before = set(store.keys())
            for number in range(start, start + 20):
                store.put(key(number), block(number)).result()
            assert before <= set(store.keys()), "what an earlier life has stored is listed"
            assert disk_bytes(tmp_path) <= limit


def test_20_a_counter_leaks_when_files_go_by_themselves(tmp_path):
    with opened(tmp_path) as store:
        empty = store.used_bytes
        for number in range(300):
            put(store, number)
            if number % 3 == 0:
                file_of(tmp_path, number).unlink()  # by somebody else
            if number % 3:
                store.delete(key(number)).result()
            else:
                assert read(store, number)[0].status is Status.MISSING
        assert store.keys() == ()
        assert abs(store.used_bytes - disk_bytes(tmp_path)) <= 4096
        assert store.used_bytes - empty <= 16384, "a folder keeps the size it once had"


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace tells in which order the system is called")
def test_21_renamed_without_a_sync(tmp_path):
    code = "import sys; sys.path.insert(0, sys.argv[2]); from pathlib import Path; from ssd_blocks import *\n"
    code += "with opened(Path(sys.argv[1])) as store: put(store, 1)"
    calls = "trace=write,pwrite64,writev,fsync,fdatasync,rename,renameat,renameat2"
    log = tmp_path / "calls"
    command = ["strace", "-f", "-y", "-e", calls, "-o", log, sys.executable, "-c", code]
    done = subprocess.run([*command, tmp_path / "ssd", Path(__file__).parent], capture_output=True, timeout=120)
    if done.returncode:
        pytest.skip(f"strace may not trace here: {done.stderr.decode()[-200:]}")
    slot = file_of(tmp_path / "ssd", 1)
    calls = [re.match(r"\d+ +(\w+)\((.*)", line) for line in log.read_text().splitlines()]
    named = [
        (call[1], call[2]) for call in calls if call and (slot.name in call[2] or f"{slot.parent.name}>" in call[2])
    ]
    written = next(place for place, (call, what) in enumerate(named) if call == "writev" and slot.name in what)
    (_, first), (synced, file), (renamed, _), (then_synced, folder) = named[written : written + 4]
    assert (synced, renamed, then_synced) == ("fsync", "rename", "fsync")
    assert slot.name in first and slot.name in file and f"{slot.parent.name}>" in folder


# --- pins, slots, ends


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
