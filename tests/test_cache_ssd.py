"""SSDStore: blocks survive restarts, and whatever happens to the disk is told apart and harms no other block."""

import hashlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import ssd_writer

from mooncake_jax.cache.ssd import IN_FLIGHT, Result, SSDStore, Status
from mooncake_jax.cache.ssd_array import SlotArray
from mooncake_jax.cache.ssd_folder import disk_bytes, remove_model
from mooncake_jax.cache.ssd_format import Header, SlotDamaged, StoredModel, slot_index
from mooncake_jax.cache.store import BlockLayout
from mooncake_jax.errors import UsageError

LAYOUT = BlockLayout(layers=3, tokens=4, kv_heads=2, head_dim=32, dtype="bfloat16")
MODEL = b"fingerprint of a model"
MODEL_FOLDER = StoredModel(MODEL, LAYOUT).name
ROOMY = 1 << 24
ALL = range(LAYOUT.layers)
DONE = Result(Status.DONE)


def opened(folder, layout=LAYOUT, fingerprint=MODEL, capacity=ROOMY):
    return closing(SSDStore(folder, layout, fingerprint, capacity))


def key(number):
    return hashlib.sha256(b"%d" % number).digest()


def block(number, layout=LAYOUT):
    return np.random.default_rng(number).integers(0, 1 << 16, layout.shape, np.uint16)


def put(store, *numbers):
    for number in numbers:
        assert store.put(key(number), block(number)).result() == DONE


def read(store, number, layers=ALL):
    out = np.zeros((len(layers), *LAYOUT.shape[1:]), np.uint16)
    return store.read(key(number), layers, out).result(), out


def assert_readable(store, *numbers):
    for number in numbers:
        result, out = read(store, number)
        assert result == DONE and np.array_equal(out, block(number))


def file_of(folder, number):
    return folder / MODEL_FOLDER / f"c.{slot_index(key(number))}.0.0"


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


# Damage.


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


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


# Disks and folders.


@contextmanager
def tmpfs(folder, options):
    folder.mkdir()
    mounted = os.geteuid() == 0 and shutil.which("mount")
    done = mounted and subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True)
    if not done or done.returncode != 0:
        pytest.skip("mounting takes root and its rights")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_fails_the_put_and_nothing_else(tmp_path):
    with tmpfs(tmp_path / "disk", "size=200k") as folder, opened(folder) as store:
        results = [store.put(key(i), block(i)).result() for i in range(60)]
        stored = [i for i, result in enumerate(results) if result == DONE]
        assert 10 < len(stored) < 60
        failed = next(result for result in results if result != DONE)
        assert failed.status == Status.FAILED and "No space left" in failed.reason and "\n" not in failed.reason
        assert len(store.keys()) == len(list((folder / MODEL_FOLDER).glob("c.*"))) == len(stored)
        assert_readable(store, *stored)
        assert store.put(key(stored[0]), block(99)).result().status == Status.FAILED  # a rewrite: the old one stays
        assert_readable(store, *stored)
        assert store.delete(key(stored[0])).result() == DONE
        put(store, 100)


def test_a_file_size_limit_fails_the_put_and_nothing_else(tmp_path):
    with opened(tmp_path) as store:
        put(store, 0)
        used, limits = store.used_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            result = store.put(key(1), block(1)).result()
            again = store.put(key(0), block(0)).result()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert result.status == again.status == Status.FAILED and "File too large" in result.reason
        assert store.used_bytes == used == disk_bytes(tmp_path)
        assert_readable(store, 0)
        put(store, 1)


@contextmanager
def read_only(folder):
    """While this lasts, a folder with a model in it cannot be written, not even by root."""
    if os.geteuid() != 0:
        (folder / MODEL_FOLDER).chmod(0o555)
        folder.chmod(0o555)
        yield
        folder.chmod(0o755)
        (folder / MODEL_FOLDER).chmod(0o755)
        return
    if subprocess.run(["mount", "--bind", folder, folder], capture_output=True).returncode != 0:
        pytest.skip("mounting takes root's rights")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True)
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def assert_serves_but_takes_nothing(store):
    assert set(store.keys()) == {key(0), key(1)}
    for future in (store.put(key(2), block(2)), store.put(key(0), block(0)), store.delete(key(0))):
        result = future.result()
        assert result.status == Status.FAILED and ("Read-only" in result.reason or "denied" in result.reason)
    assert_readable(store, 0, 1)


def test_a_read_only_folder_serves_what_it_has(tmp_path):
    with opened(tmp_path) as store:
        put(store, 0, 1)
        used = store.used_bytes
        with read_only(tmp_path):
            assert_serves_but_takes_nothing(store)
        put(store, 2)
        assert store.delete(key(2)).result() == DONE
    with read_only(tmp_path):
        with opened(tmp_path) as store:
            assert_serves_but_takes_nothing(store)
            assert store.used_bytes == used
        with pytest.raises(UsageError, match="name another folder|remove it") as caught:
            SSDStore(tmp_path, LAYOUT, b"other weights", ROOMY)
        assert "\n" not in str(caught.value)


def test_a_folder_that_goes_while_running_is_a_failure_that_says_so(tmp_path):
    folder = tmp_path / "ssd"
    with opened(folder) as store:
        put(store, 0)
        folder.rename(tmp_path / "away")
        for result in (store.put(key(1), block(1)).result(), read(store, 0)[0], store.delete(key(0)).result()):
            assert result.status == Status.FAILED and result.reason.endswith("is gone")
        assert not folder.exists()
        folder.mkdir()  # another disk, say
        assert store.put(key(1), block(1)).result().status == Status.FAILED
        folder.rmdir()
        (tmp_path / "away").rename(folder)
        assert_readable(store, 0)
        put(store, 1)


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_folder_that_cannot_be_is_a_usage_error(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="name another folder") as caught:
        SSDStore(tmp_path / name, LAYOUT, MODEL, ROOMY)
    assert "\n" not in str(caught.value)


def test_damaged_metadata_is_a_usage_error_and_its_remedy_works(tmp_path):
    with opened(tmp_path) as store:
        put(store, 0)
    metadata = tmp_path / MODEL_FOLDER / "zarr.json"
    metadata.write_text("{")
    with pytest.raises(UsageError, match="zarr.json: cannot be used .*; remove it") as caught:
        SSDStore(tmp_path, LAYOUT, MODEL, ROOMY)
    assert "\n" not in str(caught.value)
    metadata.unlink()
    with opened(tmp_path) as store:
        assert_readable(store, 0)


def test_a_folder_serves_one_process_at_a_time(tmp_path):
    hold = "import sys, ssd_writer as w; s = w.SSDStore(w.Path(sys.argv[1]), w.LAYOUT, b'', 1 << 24)"
    arguments = [sys.executable, "-c", f"{hold}; print('held', flush=True); input()", str(tmp_path)]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match=f"in use by process {holder.pid}; stop it or name another"):
            SSDStore(tmp_path, LAYOUT, MODEL, ROOMY)
        holder.kill()
    with opened(tmp_path) as store:  # a dead holder holds nothing
        put(store, 0)


def test_stale_locks_are_removed_at_start(tmp_path):
    with opened(tmp_path) as store:
        put(store, 0)
    left = [tmp_path / MODEL_FOLDER / name for name in ("c.5.0.0.__lock", f"{file_of(tmp_path, 1).name}.__lock")]
    for path in left:
        path.write_bytes(bytes(100_000))
    with opened(tmp_path) as store:
        assert not any(path.exists() for path in left)
        assert store.used_bytes == disk_bytes(tmp_path)
        put(store, 1)


def test_removing_a_model_keeps_what_is_not_its_own(tmp_path):
    with opened(tmp_path) as store:
        put(store, 0)
    notes = tmp_path / MODEL_FOLDER / "notes.txt"
    notes.write_text("mine")
    remove_model(notes.parent)
    assert [path.name for path in notes.parent.iterdir()] == ["notes.txt"]
    notes.unlink()
    remove_model(notes.parent)
    assert not notes.parent.exists()


# Long use and sudden death.


def open_files():
    return len(os.listdir("/proc/self/fd"))


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("cycles", [1000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_puts_and_deletes_leave_nothing_behind(tmp_path, cycles):
    def cycle(store, numbers):
        for number in numbers:
            waiting = [store.put(key(number + i), block(i)) for i in range(20)]
            waiting += [store.delete(key(number + i)) for i in range(20)]
            assert all(future.result() == DONE for future in waiting)

    with opened(tmp_path) as store:
        cycle(store, range(0, 500, 20))
        files, resident, used = open_files(), resident_bytes(), store.used_bytes
        cycle(store, range(500, 500 + cycles, 20))
        assert open_files() <= files
        assert resident_bytes() - resident < 8 << 20
        assert abs(store.used_bytes - used) <= 64 << 10  # of the folder's own list of names
        assert store.keys() == () and not store._last


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
            assert all(future.result() == DONE for future in again)
            assert_nothing_but(store, tmp_path)
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
    listed = len(store.keys())
    assert len(list(folder.glob("*/*"))) == listed + 1  # and the metadata
    assert disk_bytes(folder) <= 1.05 * listed * StoredModel(ssd_writer.FINGERPRINT, ssd_writer.LAYOUT).slot_bytes


def test_a_slot_is_one_file_whose_size_is_known_and_which_its_header_begins(tmp_path):
    """What listing relies on of TensorStore."""
    model = StoredModel(MODEL, LAYOUT)
    array = SlotArray(tmp_path / model.name, model)
    rows = array.rows()
    array.fill(rows, key(0), None, block(0))
    array.write(slot_index(key(0)), rows)
    raw = file_of(tmp_path, 0).read_bytes()
    assert raw[: rows.nbytes] == rows.tobytes() and len(raw) == model.slot_bytes
    assert array.header(slot_index(key(0))).key == key(0)
