"""SSDStore: the SSD tier of one node's BlockStore (report 3, figure 3): KVCache blocks that survive a restart.

Everything is asynchronous: put(), read() and delete() give `concurrent.futures` futures, not TensorStore's, since a
call is more than TensorStore could tell of: laying out, hashing, verifying and accounting run on the store's threads,
which also bound what is under way. A future's result tells what became of it; faults of the disk are no exceptions.

How blocks lie on disk is ssd_array.py's. The store keeps in memory what is on disk, with each piece's checksum, so that
a read touches nothing but the pieces it wants. It never takes more than its capacity and evicts nothing: which blocks
go decides the pool (cache/pool.py), which calls delete(). A block that turns out damaged is dropped, since it could
never be served: it has to be computed again, and then put.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from threading import Lock

import numpy as np

from mooncake_jax.cache.keys import KEY_BYTES
from mooncake_jax.cache.ssd_array import SlotArray
from mooncake_jax.cache.ssd_folder import FolderLock, disk_bytes, model_folders, remove_stale_locks
from mooncake_jax.cache.ssd_format import Header, SlotDamaged, SlotFailed, SlotMissing, StoredModel, slot_index
from mooncake_jax.cache.store import BlockLayout
from mooncake_jax.errors import UsageError

IN_FLIGHT = 4  # writes, and as many reads: more gain nothing


class Status(StrEnum):
    DONE = "done"
    MISSING = "missing"  # no such block
    DAMAGED = "damaged"  # it was there, not as it was written: it is no more
    FAILED = "failed"  # the system refused
    REFUSED = "refused"  # a put for which there is no room


@dataclass(frozen=True, slots=True)
class Result:
    """reason: one line, empty when done."""

    status: Status
    reason: str = ""


_DONE = Result(Status.DONE)


class SSDStore:
    """The blocks of one model on one node's SSD. layout: of what this node keeps of a block; fingerprint: the model's,
    as in block keys; capacity_bytes: what the folder may take on disk in all, other models' blocks included.

    Opening lists what is there, and drops what is torn. Raises UsageError if the folder cannot be used, is in use by
    another process, or could not hold a single block. If more is there than the capacity, it is listed all the same,
    and nothing can be put until enough is deleted.
    """

    def __init__(self, folder: Path, layout: BlockLayout, fingerprint: bytes, capacity_bytes: int):
        self.folder, self.layout, self.capacity_bytes = folder, layout, capacity_bytes
        self._mutex = Lock()
        self._directory: dict[int, Header] = {}  # by slot
        self._last: dict[int, Future] = {}  # by slot, the last of its puts and deletes that has not ended
        self._spare_rows: list[np.ndarray] = []
        self._claimed = 0  # bytes on disk of what is being written or dropped
        self._writers = ThreadPoolExecutor(IN_FLIGHT, "ssd-write")  # threads start when first used
        self._readers = ThreadPoolExecutor(IN_FLIGHT, "ssd-read")
        self._lock = FolderLock(folder)
        try:
            self._open(StoredModel(fingerprint, layout))
        except BaseException:
            self.close()
            raise

    def _open(self, model: StoredModel) -> None:
        self._unit = os.statvfs(self.folder).f_frsize
        self._slot_bytes = self._on_disk(model.slot_bytes)
        if self._slot_bytes > self.capacity_bytes:
            limit = f"{self.capacity_bytes} bytes hold no block of {model.slot_bytes}"
            raise UsageError(f"{self.folder}: {limit}; allow the SSD tier more")
        self._array = SlotArray(self.folder / model.name, model)
        remove_stale_locks(self.folder)
        self._list()

    # What is there.

    def headers(self) -> tuple[Header, ...]:
        """Of every block that can be read: its key, parent and time."""
        with self._mutex:
            return tuple(self._directory.values())

    def keys(self) -> tuple[bytes, ...]:
        return tuple(header.key for header in self.headers())

    @property
    def used_bytes(self) -> int:
        """On disk, with all that the folder holds and what is being written."""
        with self._mutex:
            return self._used()

    @property
    def foreign_bytes(self) -> int:
        """On disk, of other models' blocks; `mooncake-jax pool purge` removes them."""
        return sum(disk_bytes(path) for path in model_folders(self.folder) if path != self._array.folder)

    # What changes it.

    def put(self, key: bytes, block: np.ndarray, parent: bytes | None = None) -> Future:
        """Store a block durably. block: [layers, 2, tokens, kv_heads, head_dim] of the layout's item size; it must not
        change until the future ends. Its Result: done, refused (no room, or its slot holds another block) or failed.
        """
        if len(key) != KEY_BYTES or (parent is not None and len(parent) != KEY_BYTES):
            raise ValueError(f"a key has {KEY_BYTES} bytes")
        self._check_shape(block, self.layout.shape)
        return self._in_turn(slot_index(key), lambda: self._put(key, block.view(self.layout.raw), parent))

    def delete(self, key: bytes) -> Future:
        """Drop a block. Its Result: done, missing or failed."""
        return self._in_turn(slot_index(key), lambda: self._delete(key))

    def read(self, key: bytes, layers: Sequence[int], out: np.ndarray) -> Future:
        """Read some layers of a block into out, contiguous [len(layers), 2, tokens, kv_heads, head_dim] of the layout's
        item size, which holds anything unless the Result is done. Others: missing, damaged or failed.
        """
        if not layers or not all(0 <= layer < self.layout.layers for layer in layers):
            raise ValueError(f"layers {list(layers)} of a block of {self.layout.layers}")
        self._check_shape(out, (len(layers), *self.layout.shape[1:]))
        if not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError("blocks are read into contiguous, writeable memory")
        return self._readers.submit(self._read, key, layers, out)

    def close(self) -> None:
        """Finish what is under way, cancel the rest, and let the folder go."""
        for executor in (self._readers, self._writers):
            executor.shutdown(cancel_futures=True)
        self._lock.close()

    # All below runs on the store's threads, but for what the above call.

    def _in_turn(self, index: int, job: Callable[[], Result]) -> Future:
        """Run a write after those of the same slot that came before. They are ahead in the queue, so this ends."""
        with self._mutex:
            earlier = self._last.get(index)
            future = self._last[index] = self._writers.submit(_after, earlier, job)
        future.add_done_callback(lambda ended: self._forget_turn(index, ended))
        return future

    def _forget_turn(self, index: int, ended: Future) -> None:
        with self._mutex:
            if self._last.get(index) is ended:
                del self._last[index]

    def _put(self, key: bytes, block: np.ndarray, parent: bytes | None) -> Result:
        index, claim = slot_index(key), self._slot_bytes + self._unit  # the folder itself may grow
        with self._mutex:
            held = self._directory.get(index)
            if held is not None and held.key != key:
                return Result(Status.REFUSED, f"its first bits are those of block {held.key.hex()}")
            if self._used() + claim > self.capacity_bytes:
                return Result(Status.REFUSED, f"{self._used()} of {self.capacity_bytes} bytes are used")
            self._claimed += claim
        try:
            header = self._write(index, key, parent, block)
            with self._mutex:
                self._directory[index] = header
            return _DONE
        except SlotFailed as error:
            return Result(Status.FAILED, str(error))
        finally:
            with self._mutex:
                self._claimed -= claim

    def _write(self, index: int, key: bytes, parent: bytes | None, block: np.ndarray) -> Header:
        with self._mutex:
            rows = self._spare_rows.pop() if self._spare_rows else self._array.rows()
        header = self._array.fill(rows, key, parent, block)
        try:
            self._array.write(index, rows)
        finally:
            self._spare_rows.append(rows)
        return header

    def _held(self, key: bytes) -> tuple[int, Header | None]:
        """The block's slot, and its header if it is there."""
        index = slot_index(key)
        with self._mutex:
            header = self._directory.get(index)
        return index, header if header is not None and header.key == key else None

    def _delete(self, key: bytes) -> Result:
        index, header = self._held(key)
        if header is None:
            return Result(Status.MISSING)
        try:
            self._array.delete(index)
        except SlotFailed as error:
            return Result(Status.FAILED, str(error))
        self._forget(index, header)
        return _DONE

    def _read(self, key: bytes, layers: Sequence[int], out: np.ndarray) -> Result:
        index, header = self._held(key)
        if header is None:
            return Result(Status.MISSING)
        try:
            self._array.read(index, layers, header.sums, out)
        except SlotFailed as error:
            return Result(Status.FAILED, str(error))
        except SlotDamaged as error:
            self._drop_damaged(index, header)
            return Result(Status.DAMAGED, f"block {key.hex()}: {error}")
        except SlotMissing as error:
            return self._vanished(index, header, str(error))
        return _DONE

    def _vanished(self, index: int, header: Header, reason: str) -> Result:
        try:
            self._array.check_folder()
        except SlotFailed as error:
            return Result(Status.FAILED, str(error))
        self._forget(index, header)
        return Result(Status.MISSING, reason)

    def _drop_damaged(self, index: int, header: Header) -> None:
        """Not found from now on; its file goes in turn, unless the block has been written anew."""
        if not self._forget(index, header, claim=self._slot_bytes):
            return

        def drop() -> Result:
            with self._mutex:
                anew = index in self._directory
            if not anew:
                try:
                    self._array.delete(index)
                except SlotFailed as error:
                    return Result(Status.FAILED, str(error))  # its bytes stay claimed
            with self._mutex:
                self._claimed -= self._slot_bytes
            return _DONE

        self._in_turn(index, drop)

    def _forget(self, index: int, header: Header, claim: int = 0) -> bool:
        """Take a block out of the directory, if it is still this one."""
        with self._mutex:
            if self._directory.get(index) is not header:
                return False
            del self._directory[index]
            self._claimed += claim
            return True

    def _list(self) -> None:
        """Find out what is on disk: every header is read, no piece."""
        slots = dict(self._array.scan())
        for index, header in zip(slots, self._readers.map(self._recover, slots.items())):
            if header is not None:
                self._directory[index] = header
        listed = sum(slots[index].st_blocks * 512 for index in self._directory)
        self._fixed = disk_bytes(self.folder) - listed - self._folder_bytes()

    def _recover(self, slot: tuple[int, os.stat_result]) -> Header | None:
        index, status = slot
        try:
            if status.st_size != self._array.model.slot_bytes:
                raise SlotDamaged("its file has another size")
            return self._array.header(index)
        except SlotDamaged:
            try:
                self._array.delete(index)
            except SlotFailed:
                pass  # it takes space and is not listed
        except (SlotMissing, SlotFailed):
            pass
        return None

    def _used(self) -> int:
        return self._fixed + self._folder_bytes() + len(self._directory) * self._slot_bytes + self._claimed

    def _folder_bytes(self) -> int:
        """Of the folder that names the slots: 40 bytes a block."""
        try:
            return os.stat(self._array.folder).st_blocks * 512
        except OSError:
            return 0  # gone, as puts will be told

    def _on_disk(self, nbytes: int) -> int:
        return -(-nbytes // self._unit) * self._unit

    def _check_shape(self, array: np.ndarray, shape: tuple[int, ...]) -> None:
        if array.shape != shape or array.itemsize != self.layout.itemsize:
            raise ValueError(f"{array.dtype}{list(array.shape)} where the layout has {self.layout.raw}{list(shape)}")


def _after(earlier: Future | None, job: Callable[[], Result]) -> Result:
    if earlier is not None:
        wait([earlier])
    return job()
