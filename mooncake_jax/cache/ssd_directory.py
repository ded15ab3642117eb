"""Directory: which blocks of a model are on an SSD, and how much room all takes that is in the folder (report 3, figure
3). In memory, made from the slots' headers at start, so that whoever asks touches no disk.

Every change is atomic, whichever threads make them. Knows nothing of how slots are written or read.
"""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from threading import Lock

from mooncake_jax.cache.ssd_array import SlotArray
from mooncake_jax.cache.ssd_folder import allocated, disk_bytes
from mooncake_jax.cache.ssd_format import READS, Header, SlotDamaged, SlotFailed, SlotMissing, slot_index
from mooncake_jax.cache.ssd_reads import ReadCounts, Reads, reads_bytes

_NAME_BYTES = 80  # of a slot in its folder, where the folder is least full


@dataclass(slots=True)
class _Entry:
    header: Header
    reads: Reads = field(default_factory=Reads)


class Directory:
    """Of the slots of an array. capacity_bytes: what the folder around it may take, other models' blocks included, if
    the disk has so much now.

    spread: a `map` over threads, for reading all headers. Slots without a sound header are deleted.
    """

    def __init__(self, array: SlotArray, capacity_bytes: int, spread: Callable[..., Iterable]):
        disk, there = os.statvfs(array.folder), disk_bytes(array.folder.parent)
        self._array, self.capacity_bytes = array, min(capacity_bytes, there + disk.f_bavail * disk.f_frsize)
        self._mutex = Lock()
        self._claimed = 0  # bytes on disk of what is being written or dropped
        self._unit = disk.f_frsize
        self.slot_bytes = self._on_disk(array.model.slot_bytes)
        slots, counts = dict(array.scan()), ReadCounts(array.folder)
        self._entries = {
            index: _Entry(header, counts.of(index, header))
            for index, header in zip(slots, spread(self._recover, slots.items()))
            if header is not None
        }
        listed = sum(slots[index].st_blocks * 512 for index in self._entries)
        self._fixed = disk_bytes(array.folder.parent) - listed - self._names() - self._counts()
        # The counts' file, and the one that replaces it.
        self._counts_room = 2 * self._on_disk(reads_bytes(self.capacity_bytes // self.slot_bytes))

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

    # Blocks.

    def headers(self) -> tuple[Header, ...]:
        """The least recently used first."""
        with self._mutex:
            entries = sorted(
                self._entries.values(), key=lambda entry: max(entry.header.written_ns, entry.reads.last_ns)
            )
        return tuple(entry.header for entry in entries)

    def find(self, key: bytes) -> tuple[int, Header | None]:
        """The block's slot, and its header if it is there."""
        index = slot_index(key)
        with self._mutex:
            entry = self._entries.get(index)
        return index, entry.header if entry is not None and entry.header.key == key else None

    def has(self, index: int) -> bool:
        with self._mutex:
            return index in self._entries

    def enter(self, index: int, header: Header) -> None:
        """It is there from now on, in place of what was, and has never been read."""
        with self._mutex:
            self._entries[index] = _Entry(header)

    def forget(self, index: int, header: Header, claim: int = 0) -> bool:
        """Take a block out, if it is still this one, and keep claiming so much of its space; whether it was."""
        with self._mutex:
            entry = self._entries.get(index)
            if entry is None or entry.header is not header:
                return False
            del self._entries[index]
            self._claimed += claim
            return True

    # Reads.

    def count_read(self, index: int, header: Header, layers: int) -> None:
        with self._mutex:
            entry = self._entries.get(index)
            if entry is not None and entry.header is header:
                entry.reads.layers += layers
                entry.reads.last_ns = time.time_ns()

    def reads(self) -> list[tuple[int, int, Reads]]:
        """Of every block that has been read, as save_reads() takes them."""
        with self._mutex:
            entries = tuple(self._entries.items())
        return [(index, entry.header.written_ns, entry.reads) for index, entry in entries if entry.reads.layers]

    # Room.

    def claim(self, index: int, key: bytes) -> str:
        """Claim room for a block that is about to be written. Why there is none, or nothing."""
        with self._mutex:
            held = self._entries.get(index)
            if held is not None and held.header.key != key:
                return f"its first bits are those of block {held.header.key.hex()}"
            room = self.capacity_bytes - self._used() - max(self._counts_room - self._counts(), 0)
            if self.put_bytes > room:
                return f"{self._used()} of {self.capacity_bytes} bytes are used"
            self._claimed += self.put_bytes
            return ""

    def unclaim(self, nbytes: int) -> None:
        with self._mutex:
            self._claimed -= nbytes

    @property
    def put_bytes(self) -> int:
        """What a put claims: the folder itself may grow."""
        return self.slot_bytes + self._unit

    @property
    def used_bytes(self) -> int:
        """On disk, with all that the folder holds and what is claimed."""
        with self._mutex:
            return self._used()

    def capacity_blocks(self, in_flight: int) -> int:
        """How many blocks there is room for in all, with so many of them being put at once."""
        with self._mutex:
            room = self.capacity_bytes - self._fixed - self._counts_room - (in_flight + 1) * self._unit
            names_now = self._names() - self._unit
        by_growth = room // (self.slot_bytes + _NAME_BYTES)
        return max(min(by_growth, (room - names_now) // self.slot_bytes), 0)

    def _used(self) -> int:
        return self._fixed + self._names() + self._counts() + len(self._entries) * self.slot_bytes + self._claimed

    def _names(self) -> int:
        """The folder that names the slots: 40 to 80 bytes a block."""
        return allocated(self._array.folder)

    def _counts(self) -> int:
        return allocated(self._array.folder / READS)

    def _on_disk(self, nbytes: int) -> int:
        return -(-nbytes // self._unit) * self._unit
