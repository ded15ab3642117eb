"""SSDStore: how often blocks have been read is known after a restart, and costs nothing when it is lost."""

import os
import time

import numpy as np
import pytest
from ssd_blocks import ALL, DONE, LAYOUT, MODEL_FOLDER, assert_readable, block, file_of, flip, key, opened, put, read

from mooncake_jax.cache import ssd
from mooncake_jax.cache.ssd_folder import disk_bytes
from mooncake_jax.cache.ssd_format import StoredModel, slot_index
from mooncake_jax.cache.ssd_reads import ReadCounts


def layers_read(folder, store):
    """Of each block, as whoever looks at the folder finds it."""
    counts = ReadCounts(folder / MODEL_FOLDER)
    return {header.key: counts.of(slot_index(header.key), header).layers for header in store.headers()}


def test_reads_are_counted_over_restarts(tmp_path):
    with opened(tmp_path) as store:
        put(store, 0, 1, 2)
        assert_readable(store, 0, 0, 1)
        read(store, 1, [0])
    for _ in range(2):
        with opened(tmp_path) as store:
            assert layers_read(tmp_path, store) == {key(0): 6, key(1): 4, key(2): 0}
    with opened(tmp_path) as store:
        assert_readable(store, 0)
    with opened(tmp_path) as store:
        assert layers_read(tmp_path, store) == {key(0): 9, key(1): 4, key(2): 0}


def test_a_block_that_is_written_anew_has_not_been_read(tmp_path):
    with opened(tmp_path) as store:
        put(store, 0, 1)
        assert_readable(store, 0, 1)
    with opened(tmp_path) as store:
        put(store, 0)
        assert store.delete(key(1)).result() == DONE
        put(store, 1)
        assert layers_read(tmp_path, store) == {key(0): 0, key(1): 0}  # of the file that the first run left, too
        read(store, 1, [0])
    with opened(tmp_path) as store:
        assert layers_read(tmp_path, store) == {key(0): 0, key(1): 1}


def test_blocks_are_listed_by_their_last_use(tmp_path):
    with opened(tmp_path) as store:
        put(store, 0, 1, 2)
        assert_readable(store, 0)
        put(store, 3)
        expected = (key(1), key(2), key(0), key(3))
        assert store.keys() == expected
    with opened(tmp_path) as store:
        assert store.keys() == expected


def test_failed_reads_do_not_count(tmp_path):
    with opened(tmp_path) as store:
        put(store, 0, 1)
        flip(file_of(tmp_path, 0), StoredModel(b"fingerprint of a model", LAYOUT).row_bytes - 1)
        assert read(store, 0)[0] != DONE
        put(store, 0)
        read(store, 1)
    with opened(tmp_path) as store:
        assert layers_read(tmp_path, store) == {key(0): 0, key(1): 3}


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes()[:-32]),
        lambda path: flip(path, 20),
        lambda path: flip(path, 0),
    ],
    ids=["missing", "empty", "cut", "shorter", "flipped", "not ours"],
)
def test_lost_counts_cost_nothing_else(tmp_path, damage):
    with opened(tmp_path) as store:
        put(store, 0, 1)
        assert_readable(store, 0, 1)
    damage(tmp_path / MODEL_FOLDER / "reads")
    with opened(tmp_path) as store:
        assert layers_read(tmp_path, store) == {key(0): 0, key(1): 0}
        assert_readable(store, 0, 1)
    with opened(tmp_path) as store:
        assert layers_read(tmp_path, store) == {key(0): 3, key(1): 3}


def test_counts_are_saved_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr(ssd, "SAVE_READS_S", 0)
    with opened(tmp_path) as store:
        put(store, 0)
        assert_readable(store, 0)
        ended = time.monotonic() + 20
        while layers_read(tmp_path, store) != {key(0): 3}:
            assert time.monotonic() < ended
            time.sleep(0.01)
        assert store.used_bytes == disk_bytes(tmp_path)


def test_counts_are_within_the_capacity(tmp_path):
    capacity = 200 * 4096
    with opened(tmp_path, capacity=capacity) as store:
        stored = [number for number in range(200) if store.put(key(number), block(number)).result() == DONE]
        assert len(stored) >= store.capacity_blocks
        assert_readable(store, *stored)
    assert (tmp_path / MODEL_FOLDER / "reads").stat().st_size > 100 * 32
    assert disk_bytes(tmp_path) <= capacity


def test_nothing_is_left_of_counts_that_could_not_be_written(tmp_path):
    unfinished = tmp_path / MODEL_FOLDER / "reads.__lock"
    with opened(tmp_path) as store:
        put(store, 0)
        out = np.empty(LAYOUT.shape, np.uint16)
        assert store.read(key(0), ALL, out).result() == DONE
        os.mkdir(tmp_path / MODEL_FOLDER / "reads")  # nothing can be renamed to this
    assert not unfinished.exists()
    unfinished.write_bytes(b"a writer was killed")
    with opened(tmp_path) as store:
        assert not unfinished.exists()
        assert_readable(store, 0)
