"""Kinds of fault that KVCache stores in use have shipped, each with a test named after it: keys."""

import ast
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pool_blocks import landed
from ssd_blocks import ALL, DONE, LAYOUT, assert_readable, block, key, opened, put

from mooncake_jax.cache.keys import block_keys, root_key
from mooncake_jax.cache.pool import Block, KVCachePool
from mooncake_jax.cache.slots import NotWhole
from mooncake_jax.cache.ssd import Status
from mooncake_jax.cache.ssd_format import slot_index
from mooncake_jax.cache.store import BlockStore
from mooncake_jax.model.sources import model_fingerprint

PACKAGE = Path(__file__).parent.parent / "mooncake_jax"
TINY = Path(__file__).parent / "data" / "tiny-llama2"
ROOT = root_key(b"model", 4)


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
