"""SSDStore: the SSD tier of one node's BlockStore (report 3, figure 3): KVCache blocks that survive a restart.

Everything is asynchronous: put(), read() and delete() give `concurrent.futures` futures, not TensorStore's, since a
call is more than TensorStore could tell of: laying out, hashing, verifying and accounting run on the store's threads,
which also bound what is under way. A future's result tells what became of it; faults of the disk are no exceptions.

How blocks lie on disk is ssd_array.py's, what is there and how much room it takes ssd_directory.py's: a read touches
nothing but the pieces it wants. The store never takes more than its capacity and evicts nothing: which blocks go
decides the pool (cache/pool.py), which calls delete(). A block that turns out damaged is dropped, since it could never
be served: it has to be computed again, and then put.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from threading import Lock

import numpy as np

from mooncake_jax.cache.keys import KEY_BYTES
from mooncake_jax.cache.layout import BlockLayout
from mooncake_jax.cache.ssd_array import SlotArray
from mooncake_jax.cache.ssd_directory import Directory
from mooncake_jax.cache.ssd_folder import FolderLock, disk_bytes, model_folders, remove_stale_locks
from mooncake_jax.cache.ssd_format import Header, SlotDamaged, SlotFailed, SlotMissing, StoredModel, slot_index
from mooncake_jax.cache.ssd_reads import save_reads
from mooncake_jax.errors import UsageError

IN_FLIGHT = 4  # writes, and as many reads: more gain nothing
SAVE_READS_S = 60


class Status(StrEnum):
    DONE = "done"
    MISSING = "missing"  # no such block
    DAMAGED = "damaged"  # it is not as it was written: on disk, where it is no more, or in memory, when to be put
    FAILED = "failed"  # the system refused
    REFUSED = "refused"  # a put for which there is no room


@dataclass(frozen=True, slots=True)
class Result:
    """reason: one line, empty when done."""

    status: Status
    reason: str = ""


_DONE = Result(Status.DONE)


class SSDStore:
    """The blocks of one model on one node's SSD. layout: of what this node keeps of a block, from the model's
    first_layer on; fingerprint: the model's, as in block keys; capacity_bytes: what the folder may take on disk in all,
    other models' blocks included, if the disk has so much.

    Opening lists what is there, and drops what is torn. Raises UsageError if the folder cannot be used, is in use by
    another process, or could not hold a single block. If more is there than the capacity, it is listed all the same,
    and nothing can be put until enough is deleted.
    """

    def __init__(
        self, folder: Path, layout: BlockLayout, fingerprint: bytes, capacity_bytes: int, first_layer: int = 0
    ):
        self.folder, self.layout, self.capacity_bytes = folder, layout, capacity_bytes
        self._mutex = Lock()
        self._last: dict[int, Future] = {}  # by slot, the last of its puts and deletes that has not ended
        self._deleting: set[Future] = set()
        self._saved_s = time.monotonic()
        self._writers = ThreadPoolExecutor(IN_FLIGHT, "ssd-write")  # threads start when first used
        self._readers = ThreadPoolExecutor(IN_FLIGHT, "ssd-read")
        self._lock = FolderLock(folder)
        try:
            self._open(StoredModel(fingerprint, layout, first_layer))
        except BaseException:
            self._end_threads()
            self._lock.close()
            raise

    def _open(self, model: StoredModel) -> None:
        unit = os.statvfs(self.folder).f_frsize
        if -(-model.slot_bytes // unit) * unit > self.capacity_bytes:
            limit = f"{self.capacity_bytes} bytes hold no block of {model.slot_bytes}"
            raise UsageError(f"{self.folder}: {limit}; allow the SSD tier more")
        self._array = SlotArray(self.folder / model.name, model)
        remove_stale_locks(self.folder)
        self._directory = Directory(self._array, self.capacity_bytes, self._readers.map)

    # What is there.

    def headers(self) -> tuple[Header, ...]:
        """Of every block that can be read: its key, parent, time and checksums; the least recently used first."""
        return self._directory.headers()

    def keys(self) -> tuple[bytes, ...]:
        return tuple(header.key for header in self.headers())

    def sums(self, key: bytes) -> np.ndarray | None:
        """Checksums of a block's layers, against which reads verify it: uint64 [layers]; None if it is not there."""
        _, header = self._directory.find(key)
        return None if header is None else header.sums.copy()

    @property
    def capacity_blocks(self) -> int:
        """How many blocks the capacity allows in all, those there included, beside what else is in the folder now."""
        return self._directory.capacity_blocks(IN_FLIGHT)

    @property
    def used_bytes(self) -> int:
        """On disk, with all that the folder holds and what is being written."""
        return self._directory.used_bytes

    @property
    def foreign_bytes(self) -> int:
        """On disk, of other models' blocks; `mooncake-jax pool purge` removes them."""
        return sum(disk_bytes(path) for path in model_folders(self.folder) if path != self._array.folder)

    # What changes it.

    def put(self, key: bytes, block: np.ndarray, parent: bytes | None = None, sums: np.ndarray | None = None) -> Future:
        """Store a block durably. block: [layers, 2, tokens, kv_heads, head_dim] of the layout's item size; it must not
        change until the future ends. sums: the checksums that its layers are to have, uint64 [layers].

        Its Result: done, refused (no room when all deletes asked for before have ended, or its slot holds another
        block), damaged (other than its sums; nothing is written) or failed.
        """
        if len(key) != KEY_BYTES or (parent is not None and len(parent) != KEY_BYTES):
            raise ValueError(f"a key has {KEY_BYTES} bytes")
        self._check_shape(block, self.layout.shape)
        with self._mutex:
            deleting = tuple(self._deleting)
        raw = block.view(self.layout.raw)
        return self._in_turn(slot_index(key), lambda: self._put(key, raw, parent, sums, deleting))

    def delete(self, key: bytes) -> Future:
        """Drop a block. Its Result: done, missing or failed."""
        return self._in_turn(slot_index(key), lambda: self._delete(key), deletes=True)

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
        self._end_threads()
        self._save_reads()
        self._lock.close()

    def _end_threads(self) -> None:
        for executor in (self._readers, self._writers):
            executor.shutdown(cancel_futures=True)

    # All below runs on the store's threads, but for what the above call.

    def _in_turn(self, index: int, job: Callable[[], Result], deletes: bool = False) -> Future:
        """Run a write after those of the same slot that came before. They are ahead in the queue, so this ends."""
        with self._mutex:
            earlier = self._last.get(index)
            future = self._last[index] = self._writers.submit(_after, earlier, job)
            if deletes:
                self._deleting.add(future)
        future.add_done_callback(lambda ended: self._forget_turn(index, ended))
        return future

    def _forget_turn(self, index: int, ended: Future) -> None:
        with self._mutex:
            self._deleting.discard(ended)
            if self._last.get(index) is ended:
                del self._last[index]

    def _put(
        self,
        key: bytes,
        block: np.ndarray,
        parent: bytes | None,
        sums: np.ndarray | None,
        deleting: tuple[Future, ...],
    ) -> Result:
        index = slot_index(key)
        refusal = self._directory.claim(index, key)
        if refusal and deleting:  # they are ahead in the queue too
            wait(deleting)
            refusal = self._directory.claim(index, key)
        if refusal:
            return Result(Status.REFUSED, refusal)
        try:
            self._directory.enter(index, self._array.write(index, key, parent, block, sums))
            return _DONE
        except SlotFailed as error:
            return Result(Status.FAILED, str(error))
        except SlotDamaged as error:
            return Result(Status.DAMAGED, f"block {key.hex()} in memory: {error}")
        finally:
            self._directory.unclaim(self._directory.put_bytes)

    def _delete(self, key: bytes) -> Result:
        index, header = self._directory.find(key)
        if header is None:
            return Result(Status.MISSING)
        try:
            self._array.delete(index)
        except SlotFailed as error:
            return Result(Status.FAILED, str(error))
        self._directory.forget(index, header)
        return _DONE

    def _read(self, key: bytes, layers: Sequence[int], out: np.ndarray) -> Result:
        index, header = self._directory.find(key)
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
        self._directory.count_read(index, header, len(layers))
        self._save_reads_now_and_then()
        return _DONE

    def _vanished(self, index: int, header: Header, reason: str) -> Result:
        try:
            self._array.check_folder()
        except SlotFailed as error:
            return Result(Status.FAILED, str(error))
        self._directory.forget(index, header)
        return Result(Status.MISSING, reason)

    def _drop_damaged(self, index: int, header: Header) -> None:
        """Not found from now on; its file goes in turn, unless the block has been written anew."""
        claim = self._directory.slot_bytes
        if not self._directory.forget(index, header, claim):
            return

        def drop() -> Result:
            if not self._directory.has(index):
                try:
                    self._array.delete(index)
                except SlotFailed as error:
                    return Result(Status.FAILED, str(error))  # its bytes stay claimed
            self._directory.unclaim(claim)
            return _DONE

        self._in_turn(index, drop, deletes=True)

    def _save_reads_now_and_then(self) -> None:
        with self._mutex:
            due = time.monotonic() - self._saved_s > SAVE_READS_S
            if due:
                self._saved_s = time.monotonic()
        if due:
            self._writers.submit(self._save_reads)

    def _save_reads(self) -> None:
        reads = self._directory.reads()
        try:
            self._array.check_folder()
            if reads:
                save_reads(self._array.folder, reads)
        except (SlotFailed, OSError):
            pass  # a full or read-only disk: only the counts are lost

    def _check_shape(self, array: np.ndarray, shape: tuple[int, ...]) -> None:
        if array.shape != shape or array.itemsize != self.layout.itemsize:
            raise ValueError(f"{array.dtype}{list(array.shape)} where the layout has {self.layout.raw}{list(shape)}")


def _after(earlier: Future | None, job: Callable[[], Result]) -> Result:
    if earlier is not None:
        wait([earlier])
    return job()
