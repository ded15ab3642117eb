"""SlotArray: the KVCache blocks of one model on one SSD, a file each, through TensorStore (report 3, figure 3).

One sparse zarr3 array of shape [2^60, layers, row bytes]. A *slot* is what lies under one first index, the first 60
bits of a block's key, and is one file: a shard whose inner chunks are the rows. A row is one layer's K and V behind
room for a header, which only the first row fills in (ssd_format.py). So whatever is on disk can be listed from the
files' first bytes, and each layer read and verified on its own.

Why shards: measured for blocks of 80 layers and 20 MiB on a virtio disk, one plain chunk a block makes TensorStore read
all of it for a single layer (12 to 15 ms cold), and one a layer makes a block 80 files to create, sync and delete (puts
at a third of the rate). A shard is one file; a layer costs two reads (0.6 to 3 ms), the shard's index, at its end and
under a CRC of its own, and the row. A whole block costs one read, cold as fast as plain files.

Slots are written as TensorStore would write them, but straight from the block: all that a shard has besides its chunks
is the index, the same for every slot, which TensorStore encodes once. Its own way costs two copies of the block and
memory for them, and made puts a tenth slower than plain files at best, where these are a twentieth, with checksums.

A slot is whole or not there, whoever is killed (ssd_file.py). A killed writer leaves a file `.__lock`, TensorStore's
name for what is unfinished, which holds up nobody but takes space. Knows nothing of capacity, of which blocks are worth
keeping, or of other models.
"""

import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tensorstore as ts
import xxhash

from mooncake_jax.cache.ssd_file import write_durably
from mooncake_jax.cache.ssd_format import (
    ATTRIBUTES,
    INDEX_BITS,
    METADATA,
    Header,
    SlotDamaged,
    SlotFailed,
    SlotMissing,
    StoredModel,
    slot_index,
)
from mooncake_jax.errors import UsageError

_SLOT_NAME = re.compile(r"c\.(0|[1-9]\d*)\.0\.0")
_OS_ERROR = "os_error_code"  # what TensorStore says where the system refused


class SlotArray:
    """The slots in `folder`, made if need be. All calls block and may come from any thread; calls that write the same
    slot must follow one another. Raises UsageError if the folder cannot be opened.
    """

    def __init__(self, folder: Path, model: StoredModel):
        self.folder, self.model = folder, model
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._slots = self._opened()
            self._index = _shard_index(model)
            self._identity = _identity(folder)
        except OSError as error:
            raise UsageError(f"{folder}: {error.strerror}; name another folder for the SSD tier") from None
        except ValueError as error:
            what = " ".join(str(error).split())[:200]
            raise UsageError(f"{folder / METADATA}: cannot be used ({what}); remove it or the folder") from None

    def _opened(self) -> ts.TensorStore:
        """Metadata that cannot be read is written anew: what it says follows from the model, as the folder's name."""
        if StoredModel.of_folder(self.folder) is None:
            (self.folder / METADATA).unlink(missing_ok=True)
        return ts.open(_spec(self.folder, self.model), open=True, create=True, context=_context()).result()

    def write(
        self, index: int, key: bytes, parent: bytes | None, block: np.ndarray, expected: np.ndarray | None = None
    ) -> Header:
        """Store a slot durably, in place of what was there. expected: checksums that the layers are to have.

        Raises SlotDamaged if they have others, and SlotFailed; then what was there stays.
        """
        pieces = np.ascontiguousarray(block).view(np.uint8).reshape(self.model.layout.layers, -1)
        sums = np.array([xxhash.xxh3_64_intdigest(piece) for piece in pieces], np.uint64)
        if expected is not None and (wrong := np.flatnonzero(sums != expected)).size:
            raise SlotDamaged(_mismatch(wrong[0]))
        header, room = Header(key, parent, time.time_ns(), sums), bytes(self.model.header_bytes)
        buffers = [header.pack(self.model).ljust(len(room), b"\0"), pieces[0]]
        for piece in pieces[1:]:
            buffers += [room, piece]
        self.check_folder()
        try:
            write_durably(self.path(index), [*buffers, self._index])
        except OSError as error:
            raise SlotFailed(f"{self.path(index)}: {error.strerror}") from None
        return header

    def read(self, index: int, layers: Sequence[int], sums: np.ndarray, out: np.ndarray) -> None:
        """Read layers of a slot into out, contiguous [len(layers), 2, tokens, kv_heads, head_dim], and verify them.

        Raises SlotMissing, SlotDamaged or SlotFailed; then out holds anything.
        """
        pieces = out.view(np.uint8).reshape(len(layers), -1)
        try:
            source = self._slots[index, _consecutive(layers), self.model.header_bytes :]
            ts.array(pieces).write(source).result()
        except (ValueError, OSError) as error:
            raise _read_error(error) from None
        for layer, piece in zip(layers, pieces):
            if xxhash.xxh3_64_intdigest(piece) != sums[layer]:
                raise SlotDamaged(_mismatch(layer))

    def header(self, index: int) -> Header:
        """What a slot says of its block. Raises as read() does."""
        try:
            byte_range = slice(0, self.model.header_bytes)
            found = self._slots.kvstore.read(_slot_name(index), byte_range=byte_range).result()
        except (ValueError, OSError) as error:
            raise _read_error(error) from None
        if found.state != "value":
            raise SlotMissing("there is no such file")
        header = Header.unpack(found.value, self.model)
        if slot_index(header.key) != index:
            raise SlotDamaged("its header is another block's")
        return header

    def verify(self, index: int, size: int, out: np.ndarray) -> None:
        """Read all of a slot whose file has this size into out, of a block's shape. Raises as read() does."""
        if size != self.model.slot_bytes:
            raise SlotDamaged(f"its file has {size} bytes instead of {self.model.slot_bytes}")
        self.read(index, range(self.model.layout.layers), self.header(index).sums, out)

    def delete(self, index: int) -> None:
        """Raises SlotFailed; there may be nothing to delete."""
        self.check_folder()
        try:
            self._slots.kvstore.write(_slot_name(index), None).result()
        except (ValueError, OSError) as error:
            raise SlotFailed(_reason(error)) from None

    def check_folder(self) -> None:
        """Raises SlotFailed unless the folder is the one that was opened."""
        try:
            same = _identity(self.folder) == self._identity
        except OSError:
            same = False
        if not same:
            raise SlotFailed(f"{self.folder} is gone")

    def path(self, index: int) -> Path:
        """Of a slot's file."""
        return self.folder / _slot_name(index)

    def scan(self) -> Iterator[tuple[int, os.stat_result]]:
        """Index and file status of every slot on disk, in no order, whole or not."""
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if match := _SLOT_NAME.fullmatch(entry.name):
                    try:
                        yield int(match[1]), entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # deleted meanwhile


_INDEX_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]


def _spec(folder: Path, model: StoredModel) -> dict:
    shard = {
        "chunk_shape": [1, 1, model.row_bytes],
        "codecs": [{"name": "bytes"}],
        "index_codecs": _INDEX_CODECS,
        "index_location": "end",  # so that the header is what a file begins with
    }
    slot = [1, model.layout.layers, model.row_bytes]
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{folder.absolute()}/"},
        "metadata": {
            "shape": [1 << INDEX_BITS, *slot[1:]],
            "data_type": "uint8",
            "fill_value": 0,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": slot}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "codecs": [{"name": "sharding_indexed", "configuration": shard}],
            "attributes": {ATTRIBUTES: model.to_json()},
        },
        "fill_missing_data_reads": False,  # or a deleted block reads as zeros
        "store_data_equal_to_fill_value": True,
    }


def _shard_index(model: StoredModel) -> bytes:
    """What a slot's file ends with: where each row begins and how long it is, encoded as an array of its own."""
    layers = model.layout.layers
    places = np.array([(row * model.row_bytes, model.row_bytes) for row in range(layers)], np.uint64)
    metadata = {
        "shape": [layers, 2],
        "data_type": "uint64",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [layers, 2]}},
        "codecs": _INDEX_CODECS,
    }
    spec = {"driver": "zarr3", "kvstore": {"driver": "memory"}, "metadata": metadata}
    array = ts.open(spec, create=True, context=ts.Context()).result()
    array.write(places).result()
    return array.kvstore.read("c/0/0").result().value


def _context() -> ts.Context:
    """No cache: what is read is the DRAM tier's to keep."""
    return ts.Context(
        {
            "cache_pool": {"total_bytes_limit": 0},
            "data_copy_concurrency": {"limit": os.cpu_count() or 1},
            "file_io_locking": {"mode": "os"},
            "file_io_sync": True,
        }
    )


def _mismatch(layer: int) -> str:
    return f"layer {layer} does not match its checksum"


def _slot_name(index: int) -> str:
    return f"c.{index}.0.0"


def _consecutive(layers: Sequence[int]) -> slice | list[int]:
    """A slice where it will do: TensorStore reads it at once."""
    first = layers[0]
    return slice(first, first + len(layers)) if list(layers) == [*range(first, first + len(layers))] else list(layers)


def _identity(folder: Path) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())


def _read_error(error: Exception) -> Exception:
    reason = _reason(error)
    if reason.startswith("NOT_FOUND"):
        return SlotMissing("there is no such file")
    damaged = reason.startswith(("DATA_LOSS", "OUT_OF_RANGE", "FAILED_PRECONDITION")) and _OS_ERROR not in reason
    return SlotDamaged(f"its file is torn: {reason}") if damaged else SlotFailed(reason)
