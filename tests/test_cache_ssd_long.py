"""SSDStore after long use and sudden death."""

import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import ssd_writer
from ssd_blocks import DONE, block, file_of, key, open_files, opened, resident_bytes

from mooncake_jax.cache.ssd_folder import disk_bytes
from mooncake_jax.cache.ssd_format import StoredModel

CYCLES, KEPT, AT_ONCE = 20_000, 400, 20


def test_puts_and_evictions_leave_nothing_behind(tmp_path):
    def cycle(store, numbers):
        for first in range(numbers.start, numbers.stop, AT_ONCE):
            waiting = [store.delete(key(first + i - KEPT)) for i in range(AT_ONCE)] if first >= KEPT else []
            waiting += [store.put(key(first + i), block(i)) for i in range(AT_ONCE)]
            assert all(future.result() == DONE for future in waiting)

    with opened(tmp_path) as store:
        cycle(store, range(2 * KEPT))
        files, resident, used = open_files(), resident_bytes(), store.used_bytes
        cycle(store, range(2 * KEPT, 2 * KEPT + CYCLES))
        assert open_files() <= files
        assert resident_bytes() - resident < 8 << 20
        assert abs(store.used_bytes - used) <= 16 << 10  # of the folder's own list of names
        assert len(store.keys()) == KEPT and not store._last and not store._deleting
        listed = sum(
            file_of(tmp_path, number).stat().st_blocks * 512 for number in range(CYCLES + KEPT, CYCLES + 2 * KEPT)
        )
        assert disk_bytes(tmp_path) == store.used_bytes <= 1.05 * listed


def run_and_kill(folder, number, delay):
    """What a writer said it asked for and has done, until it was killed."""
    arguments = [sys.executable, ssd_writer.__file__, str(folder), str(number)]
    writer = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    lines = []
    while sum(line.startswith("done") for line in lines) < 20:
        lines.append(writer.stdout.readline())
        assert lines[-1], "the writer ended by itself"
    time.sleep(delay)
    writer.send_signal(signal.SIGKILL)
    lines += writer.communicate()[0].splitlines(keepends=True)
    said = (line.split() for line in lines if line.endswith("\n"))  # the last may be cut
    return [(what, int(which)) for what, which in said]


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_a_writer_killed_at_any_time_leaves_whole_blocks_only(tmp_path, kills):
    draw, number, torn = random.Random(kills), 0, 0
    for _ in range(kills):
        said = run_and_kill(tmp_path, number, draw.uniform(0, 0.1))
        asked = {which for what, which in said if what == "put"}
        deleted = {which for what, which in said if what == "delete"}
        acknowledged = {which for what, which in said if what == "done"}
        torn += len(list(tmp_path.glob("*/*.__lock")))
        with opened(tmp_path, ssd_writer.LAYOUT, ssd_writer.FINGERPRINT, ssd_writer.CAPACITY) as store:
            assert set(store.keys()) >= {ssd_writer.key_of(which) for which in acknowledged - deleted}
            assert_all_sound(store)
            assert_nothing_but(store, tmp_path)
            again = [store.put(ssd_writer.key_of(which), ssd_writer.block_of(which)) for which in asked]
            assert [future.result() for future in again if future.result() != DONE] == []
            assert_nothing_but(store, tmp_path)
            made_room = [store.delete(one) for one in store.keys()[: -ssd_writer.KEPT]]
            assert all(future.result() == DONE for future in made_room)
        number = max(asked) + 1
    assert torn or kills < 50, "no writer was killed in the middle of a write: this test tested nothing"


def assert_all_sound(store):
    numbers = {ssd_writer.key_of(number): number for number in range(20_000)}
    out = np.empty(ssd_writer.LAYOUT.shape, np.uint16)
    for one in store.keys():
        assert store.read(one, range(ssd_writer.LAYOUT.layers), out).result() == DONE
        assert np.array_equal(out, ssd_writer.block_of(numbers[one]))


def assert_nothing_but(store, folder):
    """What is on disk is what is listed."""
    listed, files = len(store.keys()), {path.name for path in folder.glob("*/*")}
    assert len(files - {"zarr.json", "reads"}) == listed
    assert disk_bytes(folder) <= 1.05 * listed * StoredModel(ssd_writer.FINGERPRINT, ssd_writer.LAYOUT).slot_bytes
