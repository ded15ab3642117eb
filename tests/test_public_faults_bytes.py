"""Kinds of fault that KVCache stores in use have shipped, each with a test named after it: bytes."""

import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from pool_blocks import landed
from ssd_blocks import ALL, DONE, LAYOUT, MODEL, ROOMY, block, file_of, key, opened, put, read

from mooncake_jax.cache.pool import DRAM, Block, Cause, KVCachePool
from mooncake_jax.cache.slots import NotWhole
from mooncake_jax.cache.ssd import SSDStore, Status
from mooncake_jax.cache.ssd_folder import disk_bytes
from mooncake_jax.cache.store import BlockStore


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
