"""Files that are whole or not there, whatever happens while they are written."""

import errno
import os

import numpy as np
import pytest

from mooncake_jax.cache import ssd_file
from mooncake_jax.cache.ssd_file import write_durably


@pytest.fixture
def calls(monkeypatch):
    """What is asked of the system, in order."""
    made, names = [], {}

    def recorded(name):
        call = getattr(os, name)

        def wrapper(*arguments, **kwargs):
            result = call(*arguments, **kwargs)
            if name == "open":
                names[result] = os.path.basename(arguments[0])  # what a descriptor is of
            made.append((name, names.get(arguments[0]) or os.path.basename(arguments[0])))
            return result

        return wrapper

    for name in ("open", "writev", "fsync", "rename"):
        monkeypatch.setattr(os, name, recorded(name))
    return made


def test_what_is_renamed_has_been_synced_and_then_its_folder_is(tmp_path, calls):
    """Or a block is short after a loss of power, under its own name."""
    write_durably(tmp_path / "block", [b"abc", np.arange(4, dtype=np.uint8)])
    beside = "block.__lock"
    opened = [("open", beside), ("writev", beside), ("fsync", beside), ("rename", beside)]
    assert calls == [*opened, ("open", tmp_path.name), ("fsync", tmp_path.name)]
    assert (tmp_path / "block").read_bytes() == b"abc\0\1\2\3"
    assert os.listdir(tmp_path) == ["block"]


def test_many_buffers_and_short_writes_make_the_same_file(tmp_path, monkeypatch):
    draw = np.random.default_rng(0)
    buffers = [draw.integers(0, 256, size, np.uint8) for size in draw.integers(1, 50, 2500)]
    expected, writev = b"".join(map(bytes, buffers)), os.writev
    write_durably(tmp_path / "whole", buffers)
    assert (tmp_path / "whole").read_bytes() == expected

    def short(file, views):
        some = b"".join(views)[: draw.integers(1, 300)]
        return writev(file, [some])

    monkeypatch.setattr(os, "writev", short)
    write_durably(tmp_path / "pieces", buffers)
    assert (tmp_path / "pieces").read_bytes() == expected


@pytest.mark.parametrize("failing", ["writev", "fsync", "rename"])
def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch, failing):
    (tmp_path / "block").write_bytes(b"old")

    def fail(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(ssd_file.os, failing, fail)
    with pytest.raises(OSError, match="Input/output error"):
        write_durably(tmp_path / "block", [b"new"])
    monkeypatch.undo()
    assert (tmp_path / "block").read_bytes() == b"old" and os.listdir(tmp_path) == ["block"]
    assert not open_descriptors_of(tmp_path)


def open_descriptors_of(folder):
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:  # of the listing itself
            continue
    return [path for path in found if path.startswith(str(folder))]


def test_what_a_killed_writer_left_does_not_end_up_in_the_file(tmp_path):
    (tmp_path / "block.__lock").write_bytes(bytes(1000))
    write_durably(tmp_path / "block", [b"new"])
    assert (tmp_path / "block").read_bytes() == b"new"
