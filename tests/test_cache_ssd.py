"""SSDStore: blocks come back as they went in, also after a restart, within the capacity, and never another's."""

import json
import shutil
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from ssd_blocks import ALL, DONE, LAYOUT, MODEL, MODEL_FOLDER, assert_readable, block, file_of, key, opened, put, read

from mooncake_jax.cache.layout import BlockLayout
from mooncake_jax.cache.ssd import IN_FLIGHT, Result, SSDStore, Status
from mooncake_jax.cache.ssd_array import SlotArray
from mooncake_jax.cache.ssd_folder import disk_bytes
from mooncake_jax.cache.ssd_format import StoredModel, slot_index
from mooncake_jax.errors import UsageError

# Round trips and restarts.


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)])
def test_a_block_comes_back_as_it_went_in(tmp_path, dtype):
    layout = BlockLayout(layers=5, tokens=6, kv_heads=3, head_dim=8, dtype=dtype.name)
    values = np.random.default_rng(0).standard_normal(layout.shape).astype(dtype)
    with opened(tmp_path, layout) as store:
        assert store.put(key(0), values, parent=key(1)).result() == DONE
        for layers in ([0, 1, 2, 3, 4], range(1, 3), [4], [3, 0], [2, 2]):
            out = np.zeros((len(layers), *layout.shape[1:]), dtype)
            assert store.read(key(0), layers, out).result() == DONE
            assert np.array_equal(out.view(layout.raw), values[list(layers)].view(layout.raw))


def test_blocks_that_are_not_contiguous_and_all_zero_can_be_put(tmp_path):
    wide = np.random.default_rng(0).integers(0, 9, (*LAYOUT.shape, 2), np.uint16)
    with opened(tmp_path) as store:
        assert store.put(key(0), wide[..., 1]).result() == DONE
        assert store.put(key(1), np.zeros(LAYOUT.shape, np.uint16)).result() == DONE
        assert np.array_equal(read(store, 0)[1], wide[..., 1])
        result, out = read(store, 1)
        assert result == DONE and not out.any()


def test_what_was_put_is_there_after_a_restart(tmp_path):
    started = time.time_ns()
    with opened(tmp_path) as store:
        put(store, *range(20))
        assert store.put(key(20), block(20), parent=key(19)).result() == DONE
        assert store.delete(key(3)).result() == DONE
        used = store.used_bytes
    with opened(tmp_path) as store:
        headers = {header.key: header for header in store.headers()}
        assert headers.keys() == {key(number) for number in range(21) if number != 3}
        assert headers[key(20)].parent == key(19) and headers[key(19)].parent is None
        assert all(started <= header.written_ns <= time.time_ns() for header in headers.values())
        assert_readable(store, *(number for number in range(21) if number != 3))
        assert store.used_bytes == used


def test_many_at_once_keep_to_the_threads_there_are_and_to_their_order(tmp_path):
    with opened(tmp_path) as store:
        futures = [store.put(key(number % 10), block(number % 10)) for number in range(50)]
        futures += [store.delete(key(number)) for number in range(5)]
        outs = [np.zeros(LAYOUT.shape, np.uint16) for _ in range(50)]
        assert all(future.result() == DONE for future in futures)
        reads = [store.read(key(5 + number % 5), ALL, out) for number, out in enumerate(outs)]
        assert all(future.result() == DONE for future in reads)
        assert all(np.array_equal(out, block(5 + number % 5)) for number, out in enumerate(outs))
        assert set(store.keys()) == {key(number) for number in range(5, 10)}
        for kind in ("ssd-read", "ssd-write"):
            assert sum(thread.name.startswith(kind) for thread in threading.enumerate()) <= IN_FLIGHT


def test_one_layer_costs_no_more_than_it_has(tmp_path):
    layout = BlockLayout(layers=32, tokens=16, kv_heads=4, head_dim=64, dtype="float32")
    piece = layout.nbytes // layout.layers

    def read_bytes():
        return int(Path("/proc/self/io").read_text().split()[1])

    with opened(tmp_path, layout) as store:
        store.put(key(0), np.ones(layout.shape, np.uint32)).result()
        before, out = read_bytes(), np.zeros((1, *layout.shape[1:]), np.uint32)
        assert store.read(key(0), [7], out).result() == DONE and out.all()
        assert read_bytes() - before < 2 * piece


@pytest.mark.parametrize(
    "call",
    [
        lambda store, out: store.put(b"short", out),
        lambda store, out: store.put(key(0), out, parent=b"short"),
        lambda store, out: store.put(key(0), out[1:]),
        lambda store, out: store.put(key(0), out.astype(np.uint32)),
        lambda store, out: store.read(key(0), [], out[:0]),
        lambda store, out: store.read(key(0), [3], out[:1]),
        lambda store, out: store.read(key(0), [0], out),
        lambda store, out: store.read(key(0), [0, 1], out[::2]),
    ],
)
def test_what_does_not_fit_the_layout_is_an_error_at_once(tmp_path, call):
    with opened(tmp_path) as store, pytest.raises(ValueError):
        call(store, np.zeros(LAYOUT.shape, np.uint16))


def test_a_slot_is_the_file_that_tensorstore_would_write_and_begins_with_its_header(tmp_path):
    """What listing, and writing past TensorStore, rely on."""
    model, theirs = StoredModel(MODEL, LAYOUT), tmp_path / "theirs"
    with opened(tmp_path / "ours") as store:
        put(store, 0)
    raw = file_of(tmp_path / "ours", 0).read_bytes()
    rows = np.frombuffer(raw, np.uint8, LAYOUT.layers * model.row_bytes).reshape(LAYOUT.layers, -1)
    assert len(raw) == model.slot_bytes
    assert np.array_equal(rows[:, model.header_bytes :], block(0).view(np.uint8).reshape(LAYOUT.layers, -1))
    spec = json.loads((tmp_path / "ours" / MODEL_FOLDER / "zarr.json").read_text())
    kvstore = {"driver": "file", "path": f"{theirs}/"}
    array = ts.open({"driver": "zarr3", "kvstore": kvstore, "metadata": spec}, create=True).result()
    array[slot_index(key(0))].write(rows).result()
    assert (theirs / file_of(tmp_path, 0).name).read_bytes() == raw
    assert SlotArray(tmp_path / "ours" / MODEL_FOLDER, model).header(slot_index(key(0))).key == key(0)


# Capacity.


def test_never_more_on_disk_than_the_capacity(tmp_path):
    capacity = 40 * 4096
    with opened(tmp_path, capacity=capacity) as store:
        results = [future.result() for future in [store.put(key(i), block(i)) for i in range(60)]]
        stored = [i for i, result in enumerate(results) if result == DONE]
        assert 20 < len(stored) < 40
        refused = [result for result in results if result != DONE]
        assert all(result.status == Status.REFUSED and f"of {capacity} bytes" in result.reason for result in refused)
        assert 0.95 * store.used_bytes <= disk_bytes(tmp_path) <= min(capacity, 1.05 * store.used_bytes)
        assert_readable(store, *stored)
        assert store.delete(key(stored[0])).result() == DONE
        put(store, 100)
    with opened(tmp_path, capacity=capacity // 2) as store:  # less than is there
        assert len(store.keys()) == len(stored)
        assert store.put(key(0), block(0)).result().status == Status.REFUSED
        assert_readable(store, 100, *stored[1:])


def test_a_capacity_below_one_block_is_refused(tmp_path):
    with pytest.raises(UsageError, match="100 bytes hold no block"):
        SSDStore(tmp_path, LAYOUT, MODEL, 100)
    with opened(tmp_path):
        pass  # and the folder is free again


def test_the_capacity_in_blocks_can_be_filled_and_no_more_than_used(tmp_path):
    capacity = 100 * 4096
    with opened(tmp_path, capacity=capacity) as store:
        blocks = store.capacity_blocks
        assert 80 <= blocks <= 100
        futures = [store.put(key(number), block(number)) for number in range(blocks)]
        assert all(future.result() == DONE for future in futures)
        assert blocks <= store.capacity_blocks <= blocks + 5
        assert_readable(store, *range(blocks))
    assert disk_bytes(tmp_path) <= capacity
    with opened(tmp_path, capacity=capacity) as store:
        assert blocks <= store.capacity_blocks <= blocks + 5
    with opened(tmp_path, fingerprint=b"other weights", capacity=capacity) as store:
        assert store.capacity_blocks <= 5
    with opened(tmp_path, capacity=capacity // 2) as store:
        assert 35 <= store.capacity_blocks < 50


def test_a_full_store_takes_a_block_for_each_that_it_is_told_to_drop(tmp_path):
    with opened(tmp_path, capacity=60 * 4096) as store:
        held = list(range(store.capacity_blocks))
        put(store, *held)
        waiting = []
        for number in range(1000, 1200):
            waiting += [store.delete(key(held[number - 1000])), store.put(key(number), block(number))]
            held.append(number)
        assert all(future.result() == DONE for future in waiting)
        assert set(store.keys()) == {key(number) for number in held[200:]}


# Checksums that the block comes with.


def test_a_block_that_is_not_what_its_checksums_say_is_not_written(tmp_path):
    with opened(tmp_path) as store:
        put(store, 0)
        sums = store.sums(key(0))
        assert sums.dtype == np.uint64 and sums.shape == (LAYOUT.layers,)
        assert store.sums(key(1)) is None
        assert store.delete(key(0)).result() == DONE
        rotten = block(0)
        rotten[1, 0, 0, 0, 0] ^= 1
        result = store.put(key(0), rotten, sums=sums).result()
        assert result.status == Status.DAMAGED
        assert result.reason == f"block {key(0).hex()} in memory: layer 1 does not match its checksum"
        assert store.keys() == () and not file_of(tmp_path, 0).exists()
        assert store.put(key(0), block(0), sums=sums).result() == DONE
        assert np.array_equal(store.sums(key(0)), sums)
        assert store.put(key(0), rotten, sums=sums).result().status == Status.DAMAGED  # the sound one stays
        assert_readable(store, 0)
        assert store.used_bytes == disk_bytes(tmp_path)


# What is not there.


def test_missing_is_no_failure(tmp_path):
    with opened(tmp_path) as store:
        put(store, 0)
        assert read(store, 1)[0] == Result(Status.MISSING)
        assert store.delete(key(1)).result() == Result(Status.MISSING)
        assert_readable(store, 0)


def test_blocks_with_equal_first_60_bits_are_not_taken_for_one_another(tmp_path):
    twin = bytearray(key(0))
    twin[7] ^= 1  # bit 63 of the key
    twin, out = bytes(twin), np.zeros(LAYOUT.shape, np.uint16)
    assert slot_index(twin) == slot_index(key(0))
    for _ in range(2):
        with opened(tmp_path) as store:
            put(store, 0)
            assert store.read(twin, ALL, out).result() == Result(Status.MISSING)
            assert store.delete(twin).result() == Result(Status.MISSING)
            result = store.put(twin, block(1)).result()
            assert result.status == Status.REFUSED and key(0).hex() in result.reason
            assert store.keys() == (key(0),)
            assert_readable(store, 0)


def test_other_models_blocks_are_neither_found_nor_touched(tmp_path):
    other_layout = BlockLayout(layers=2, tokens=4, kv_heads=2, head_dim=32, dtype="bfloat16")
    with opened(tmp_path) as store:
        put(store, 0, 1)
        used = store.used_bytes
    for fingerprint, layout in ((b"other weights", LAYOUT), (MODEL, other_layout)):
        with opened(tmp_path, layout, fingerprint) as store:
            assert store.keys() == ()
            assert store.foreign_bytes > 0 and store.used_bytes > used
            out = np.zeros(layout.shape, np.uint16)
            assert store.read(key(0), range(layout.layers), out).result() == Result(Status.MISSING)
            assert store.put(key(0), block(5, layout)).result() == DONE
    with opened(tmp_path) as store:
        assert len(store.keys()) == 2
        assert_readable(store, 0, 1)


def test_a_foreign_slot_in_the_folder_is_dropped(tmp_path):
    for fingerprint, number in ((MODEL, 0), (b"other weights", 1)):
        with opened(tmp_path, fingerprint=fingerprint) as store:
            put(store, number)
    other = tmp_path / StoredModel(b"other weights", LAYOUT).name
    shutil.copy(other / file_of(tmp_path, 1).name, file_of(tmp_path, 1))
    shutil.copy(file_of(tmp_path, 0), file_of(tmp_path, 2))
    with opened(tmp_path) as store:
        assert store.keys() == (key(0),)
    assert not file_of(tmp_path, 1).exists() and not file_of(tmp_path, 2).exists()
