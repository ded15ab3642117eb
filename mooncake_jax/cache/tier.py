"""One tier of one node's part of the KVCache pool: which blocks are in it, and which leave (report 3, figure 3).

A tier is a number of slots. In DRAM a slot is a place in the node's slab; on the SSD, where blocks lie by their keys,
only the number of slots matters. A block *lands* once all its bytes are in the tier; until then, and while somebody
reads it, it is pinned and cannot leave. Knows nothing of other tiers and nodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mooncake_jax.cache.eviction import EvictionPolicy


@dataclass(frozen=True, slots=True)
class Block:
    """One KVCache block on one node: its key and the slot of that node's DRAM it lies, or will lie, in."""

    key: bytes
    slot: int


@dataclass(slots=True)
class Entry:
    slot: int
    landed: bool = False
    pins: int = 0


class Tier:
    """entries: the blocks by key. The policy knows the same keys, and which of them are pinned."""

    def __init__(self, slots: int, policy: EvictionPolicy):
        self.capacity = slots
        self.entries: dict[bytes, Entry] = {}
        self._policy = policy
        self._free = list(range(slots - 1, -1, -1))

    def has_landed(self, key: bytes) -> bool:
        entry = self.entries.get(key)
        return entry is not None and entry.landed

    def reserve(self, keys: Sequence[bytes]) -> tuple[int, list[bytes]]:
        """Pin a prompt's leading blocks, those here and those to come, and tell the policy of their use.

        Returns how many leading ones found room, and which blocks were evicted for them.
        """
        there = dict.fromkeys(key for key in keys if key in self.entries)
        for key in there:  # before room is made, which must not cost the prompt blocks of its own
            self.pin(key)
        fitting, evicted = self._give_slots(keys)
        for depth in range(fitting - 1, -1, -1):  # the head of a chain comes last, so that it outlives its tail
            if keys[depth] in there:
                self._policy.use(keys[depth])
            else:
                self._policy.insert(keys[depth], depth)
                self.pin(keys[depth])
        for key in keys[fitting:]:
            if key in there:
                self.unpin(key)
        return fitting, evicted

    def admit(self, depths: Mapping[bytes, int]) -> tuple[int, list[bytes]]:
        """Pin blocks that are to come, given with their places in one prompt, in order. Returns as reserve() does."""
        keys = list(depths)
        fitting, evicted = self._give_slots(keys)
        for key in reversed(keys[:fitting]):
            self._policy.insert(key, depths[key])
            self.pin(key)
        return fitting, evicted

    def use(self, key: bytes) -> None:
        """Tell the policy of a use. Those of one prompt are told from its last block to its first."""
        self._policy.use(key)

    def _give_slots(self, keys: Sequence[bytes]) -> tuple[int, list[bytes]]:
        """To those that have none, from the first on while there is room."""
        evicted: list[bytes] = []
        for place, key in enumerate(keys):
            if key in self.entries:
                continue
            if not self._free and not self._evict(evicted):
                return place, evicted
            self.entries[key] = Entry(self._free.pop())
        return len(keys), evicted

    def _evict(self, evicted: list[bytes]) -> bool:
        key = self._policy.evict()
        if key is None:
            return False
        self._free.append(self.entries.pop(key).slot)
        evicted.append(key)
        return True

    def restore(self, key: bytes, depth: int) -> None:
        """A block that is here from an earlier run, while there are free slots. depth: its place in its prompt."""
        self.entries[key] = Entry(self._free.pop(), landed=True)
        self._policy.insert(key, depth)

    def pin(self, key: bytes) -> None:
        entry = self.entries[key]
        entry.pins += 1
        if entry.pins == 1:
            self._policy.pin(key)

    def unpin(self, key: bytes) -> None:
        """A block that never landed and that nobody else waits for gives its slot back. Raises ValueError if it is not
        pinned: somebody else's pin would be taken away the next time.
        """
        entry = self.entries[key]
        if not entry.pins:
            raise ValueError(f"block {key.hex()[:12]} is not pinned")
        entry.pins -= 1
        if entry.pins == 0:
            self._policy.unpin(key)
            if not entry.landed:
                self._discard(key)

    def lose(self, key: bytes) -> None:
        """A block turned out unreadable: it is as if it had never landed."""
        entry = self.entries[key]
        entry.landed = False
        if entry.pins == 0:
            self._discard(key)

    def _discard(self, key: bytes) -> None:
        self._policy.remove(key)
        self._free.append(self.entries.pop(key).slot)

    def check(self) -> None:
        """Assert the invariants: each slot is used once or free, no pin is negative, nothing unpinned is half-
        written.
        """
        slots = [entry.slot for entry in self.entries.values()] + self._free
        assert sorted(slots) == list(range(self.capacity)), "slots leaked or used twice"
        self._policy.check()
        for key, entry in self.entries.items():
            assert entry.pins >= 0, f"block {key.hex()[:12]} has {entry.pins} pins"
            assert entry.landed or entry.pins > 0, f"block {key.hex()[:12]} is unpinned and not landed"
