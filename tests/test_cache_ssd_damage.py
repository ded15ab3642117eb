"""SSDStore: damage is noticed, told, and harms no other block."""

import shutil

import numpy as np
import pytest
from ssd_blocks import DONE, LAYOUT, MODEL, assert_readable, block, file_of, flip, key, opened, put, read

from mooncake_jax.cache.ssd import Result, Status
from mooncake_jax.cache.ssd_folder import disk_bytes
from mooncake_jax.cache.ssd_format import Header, SlotDamaged, StoredModel


def write_bytes(path, change):
    path.write_bytes(change(path.read_bytes()))


ROW = StoredModel(MODEL, LAYOUT).row_bytes
DAMAGE = {
    "flipped bit in the first piece": lambda path: flip(path, ROW - 5),
    "flipped bit in the last piece": lambda path: flip(path, 3 * ROW - 5),
    "flipped bit in the shard's index": lambda path: flip(path, 3 * ROW + 8),
    "truncated": lambda path: write_bytes(path, lambda raw: raw[: len(raw) // 2]),
    "cut by a byte": lambda path: write_bytes(path, lambda raw: raw[:-1]),
    "longer": lambda path: write_bytes(path, lambda raw: raw + b"x"),
    "zero-length": lambda path: path.write_bytes(b""),
    "zeros": lambda path: write_bytes(path, lambda raw: bytes(len(raw))),
    "another block's": lambda path: shutil.copy(file_of(path.parents[1], 0), path),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_block_is_told_dropped_and_can_be_put_again(tmp_path, what):
    with opened(tmp_path) as store:
        put(store, 0, 1, 2)
        DAMAGE[what](file_of(tmp_path, 1))
        used = store.used_bytes
        result, _ = read(store, 1)
        assert result.status == Status.DAMAGED and key(1).hex() in result.reason
        assert set(store.keys()) == {key(0), key(2)}
        assert read(store, 1)[0] == Result(Status.MISSING)
        assert_readable(store, 0, 2)
        put(store, 1)
        assert_readable(store, 0, 1, 2)
        assert store.used_bytes == used


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_before_a_start_is_found_then_or_on_reading(tmp_path, what):
    with opened(tmp_path) as store:
        put(store, 0, 1, 2)
    DAMAGE[what](file_of(tmp_path, 1))
    with opened(tmp_path) as store:
        listed = what.startswith("flipped")  # such damage shows only when all of it is read
        assert (key(1) in store.keys()) == listed
        assert read(store, 1)[0].status == (Status.DAMAGED if listed else Status.MISSING)
        assert_readable(store, 0, 2)
        put(store, 1)
        assert_readable(store, 0, 1, 2)
        assert disk_bytes(tmp_path) == store.used_bytes


def test_each_layer_is_verified_on_its_own(tmp_path):
    with opened(tmp_path) as store:
        put(store, 0)
        flip(file_of(tmp_path, 0), 2 * ROW - 1)
        for layers in ([0], [2], [0, 2]):
            result, out = read(store, 0, layers)
            assert result == DONE and np.array_equal(out, block(0)[layers])
        result, _ = read(store, 0, [1])
        assert result.status == Status.DAMAGED and "layer 1" in result.reason


@pytest.mark.parametrize("offset", [0, 8, 12, 16, 48, 80, 112, 120, 128, 128 + 8 * LAYOUT.layers - 1])
def test_a_flipped_bit_in_a_header_loses_that_block_only(tmp_path, offset):
    with opened(tmp_path) as store:
        put(store, 0, 1)
    flip(file_of(tmp_path, 0), offset)
    with opened(tmp_path) as store:
        assert store.keys() == (key(1),)
        assert not file_of(tmp_path, 0).exists()
        put(store, 0)
        assert_readable(store, 0, 1)


def test_a_header_is_read_as_it_was_written():
    model, sums = StoredModel(MODEL, LAYOUT), np.arange(3, dtype=np.uint64) + (1 << 63)
    raw = Header(key(0), key(1), 12345, sums).pack(model).ljust(model.header_bytes, b"\0")
    header = Header.unpack(raw, model)
    assert (header.key, header.parent, header.written_ns) == (key(0), key(1), 12345)
    assert np.array_equal(header.sums, sums)
    with pytest.raises(SlotDamaged, match="another model's"):
        Header.unpack(raw, StoredModel(b"other weights", LAYOUT))


def test_a_deleted_file_is_a_miss(tmp_path):
    with opened(tmp_path) as store:
        put(store, 0, 1)
        used = store.used_bytes
        file_of(tmp_path, 0).unlink()
        assert read(store, 0)[0] == Result(Status.MISSING, "there is no such file")
        assert store.keys() == (key(1),)
        put(store, 0)
        assert_readable(store, 0, 1)
        assert store.used_bytes == used == disk_bytes(tmp_path)
