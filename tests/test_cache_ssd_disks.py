"""SSDStore on disks that are full, read-only or gone, and in folders that others use or have damaged."""

import os
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from ssd_blocks import (
    DONE,
    LAYOUT,
    MODEL,
    MODEL_FOLDER,
    ROOMY,
    assert_readable,
    block,
    file_of,
    fill,
    key,
    opened,
    put,
    read,
    tmpfs,
)

from mooncake_jax.cache.ssd import SSDStore, Status
from mooncake_jax.cache.ssd_folder import check_folder, disk_bytes, remove_model
from mooncake_jax.errors import UsageError


def test_a_full_disk_fails_the_put_and_nothing_else(tmp_path):
    with tmpfs(tmp_path / "disk", "size=400k") as folder, opened(folder) as store:
        stored = range(10)
        put(store, *stored)
        fill(folder)
        for number in range(10, 15):
            failed = store.put(key(number), block(number)).result()
            assert failed.status == Status.FAILED and "No space left" in failed.reason and "\n" not in failed.reason
        assert len(store.keys()) == len(list((folder / MODEL_FOLDER).glob("c.*"))) == len(stored)
        assert_readable(store, *stored)
        assert store.put(key(0), block(99)).result().status == Status.FAILED  # a rewrite: the old one stays
        assert_readable(store, *stored)
        assert store.delete(key(0)).result() == DONE
        put(store, 100)


def test_no_more_is_put_than_the_disk_had_room_for(tmp_path):
    with tmpfs(tmp_path / "disk", "size=200k") as folder, opened(folder) as store:
        statuses = [store.put(key(number), block(number)).result().status for number in range(60)]
        assert set(statuses) == {Status.DONE, Status.REFUSED}
        assert 10 < statuses.count(Status.DONE) and store.capacity_blocks <= statuses.count(Status.DONE)
        assert disk_bytes(folder) <= 200 << 10


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


def test_folders_are_checked_as_they_will_be_opened_and_none_is_made(tmp_path):
    (tmp_path / "file").write_text("")
    check_folder(tmp_path / "new" / "prefill0")
    for place, told in [(tmp_path / "file" / "prefill0", "Not a directory"), (Path("/proc/prefill0"), "")]:
        with pytest.raises(UsageError, match=f"{place}: {told}.*; name another folder for the SSD tier"):
            check_folder(place)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with opened(tmp_path / "prefill0") as store:
        put(store, 0)
        with pytest.raises(UsageError, match="in use by process"):
            check_folder(tmp_path / "prefill0")
    with read_only(tmp_path / "prefill0"):
        check_folder(tmp_path / "prefill0")


def test_a_read_only_folder_serves_what_it_has(tmp_path):
    with opened(tmp_path) as store:
        put(store, 0, 1)
        with read_only(tmp_path):
            assert_serves_but_takes_nothing(store)
        put(store, 2)
        assert store.delete(key(2)).result() == DONE
    with read_only(tmp_path):
        with opened(tmp_path) as store:
            assert_serves_but_takes_nothing(store)
            assert store.used_bytes == disk_bytes(tmp_path)
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


def test_damaged_metadata_is_written_anew(tmp_path):
    with opened(tmp_path) as store:
        put(store, 0)
    metadata = tmp_path / MODEL_FOLDER / "zarr.json"
    whole = metadata.read_text()
    for damage in ("", "{", whole[:-20], whole.replace("float", "int").replace("bfloat16", "uint16")):
        metadata.write_text(damage)
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
        assert_readable(store, 0)
    notes = tmp_path / MODEL_FOLDER / "reads.txt"
    notes.write_text("mine")
    assert (notes.parent / "reads").exists()
    remove_model(notes.parent)
    assert [path.name for path in notes.parent.iterdir()] == ["reads.txt"]
    notes.unlink()
    remove_model(notes.parent)
    assert not notes.parent.exists()
