"""Files that are whole or not there: written beside, synced, renamed, and their folder synced, so that whatever dies, a
process or the machine, leaves what was there before or all of what is new. Knows nothing of blocks.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from mooncake_jax.cache.ssd_format import UNFINISHED

_AT_ONCE = 1000  # buffers: Linux takes 1024


def write_durably(path: Path, buffers: Sequence[bytes | np.ndarray]) -> None:
    """The bytes of all buffers, one after the other, none empty. Raises OSError; then what was there stays."""
    unfinished = path.with_name(path.name + UNFINISHED)
    file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        try:
            _write_all(file, [memoryview(buffer).cast("B") for buffer in buffers])
            os.fsync(file)
        finally:
            os.close(file)
        os.rename(unfinished, path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make durable what was renamed or removed in it. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(file: int, buffers: list[memoryview]) -> None:
    first = 0
    while first < len(buffers):
        written = os.writev(file, buffers[first : first + _AT_ONCE])
        while first < len(buffers) and written >= len(buffers[first]):
            written -= len(buffers[first])
            first += 1
        if written:  # a disk that fills up takes a part
            buffers[first] = buffers[first][written:]
