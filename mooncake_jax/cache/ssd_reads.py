"""How often, and when last, the blocks of a model have been read from SSD since they were written: a file beside them.

It is written whole and renamed, but not synced, at close and every now and then: a torn or missing one costs the
counts and nothing else. Each count names the time when its block was written, so that none outlives its block.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from mooncake_jax.cache.ssd_format import READS, UNFINISHED, Header

_MAGIC = b"KVCREADS"
_RECORD = np.dtype([("index", "<u8"), ("written_ns", "<u8"), ("layers", "<u8"), ("last_ns", "<u8")])
_START = len(_MAGIC) + 8  # and a checksum


@dataclass(slots=True)
class Reads:
    """layers: how many layers have been read in all, of a block read twice twice as many as it has; last_ns: since
    1970, 0 for never.
    """

    layers: int = 0
    last_ns: int = 0


class ReadCounts:
    """What a file of a model's folder says; nothing if it is torn or missing."""

    def __init__(self, folder: Path):
        self._records = {(index, written): Reads(layers, last) for index, written, layers, last in _load(folder)}

    def of(self, index: int, header: Header) -> Reads:
        """Of the block in a slot."""
        return self._records.get((index, header.written_ns), Reads())


def save_reads(folder: Path, reads: Iterable[tuple[int, int, Reads]]) -> None:
    """Each with its slot's index, and the time its block was written. Raises OSError."""
    records = np.array([(index, written, one.layers, one.last_ns) for index, written, one in reads], _RECORD).tobytes()
    path, unfinished = folder / READS, folder / f"{READS}{UNFINISHED}"
    check = xxhash.xxh3_64_intdigest(records).to_bytes(8, "little")
    try:
        unfinished.write_bytes(_MAGIC + check + records)
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def reads_bytes(blocks: int) -> int:
    """Of the file for so many blocks."""
    return _START + blocks * _RECORD.itemsize


def _load(folder: Path) -> list[tuple[int, int, int, int]]:
    try:
        raw = (folder / READS).read_bytes()
    except OSError:
        return []
    records = raw[_START:]
    whole = len(records) % _RECORD.itemsize == 0
    if not whole or raw[:_START] != _MAGIC + xxhash.xxh3_64_intdigest(records).to_bytes(8, "little"):
        return []
    return np.frombuffer(records, _RECORD).tolist()
