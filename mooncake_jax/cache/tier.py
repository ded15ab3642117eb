"""One tier of one node's part of the KVCache pool: which blocks are in it, and which leave (report 3, figure 3).

A tier is a number of slots. In DRAM a slot is a place in the node's slab; on the SSD, where blocks lie by their keys,
only the number of slots matters. A block *lands* once all its bytes are in the tier; until then, and while somebody
reads it, it is pinned and cannot leave. Knows nothing of other tiers and nodes.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mooncake_jax.cache.eviction import EvictionPolicy


@dataclass(frozen=True, slots=True)
class Block:
    """One KVCache block on one node: its key and the slot of that node's DRAM it lies, or will lie, in."""

    key: bytes
    slot: int


@dataclass(slots=True)
class Entry:
    """block: as it was last asked for."""

    slot: int
    landed: bool = False
    pins: int = 0
    block: Block | None = None


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

        Returns how many leading ones found room, and which blocks were evicted for them. Raises ValueError, with
        nothing changed, if a key comes twice: it stands for all blocks up to its own, so such keys are no prompt's.
        """
        if len(set(keys)) < len(keys):
            twice = next(key for place, key in enumerate(keys) if key in keys[:place])
            raise ValueError(f"block {twice.hex()[:12]} comes twice in a prompt; its keys must be chained")
        there = [key for key in keys if key in self.entries]
        self.pin(there)  # before room is made, which must not cost the prompt blocks of its own
        if len(there) == len(keys):
            self._policy.use_prompt(keys, ())
            return len(keys), []
        new = [key for key in keys if key not in self.entries]
        placed, evicted = self._place(new)
        fitting = len(keys) if placed == len(new) else keys.index(new[placed])
        self._policy.use_prompt(keys[:fitting], new[:placed])
        self._policy.pin_all(new[:placed])
        if fitting < len(keys):
            beyond = set(keys[fitting:])
            self.unpin([key for key in there if key in beyond])
        return fitting, evicted

    def admit(self, depths: Mapping[bytes, int]) -> tuple[int, list[bytes]]:
        """Pin blocks that are to come, given with their places in one prompt, in order. Returns as reserve() does."""
        placed, evicted = self._place(list(depths))
        if placed < len(depths):
            depths = dict(itertools.islice(depths.items(), placed))
        self._policy.insert_all(depths)
        self._policy.pin_all(depths)
        return placed, evicted

    def use(self, keys: Sequence[bytes]) -> None:
        """Tell the policy of a use of a prompt's blocks, given from the first on."""
        self._policy.use_prompt(keys, ())

    def _place(self, keys: Sequence[bytes]) -> tuple[int, list[bytes]]:
        """Give slots to blocks that have none, from the first on while there is room, and a pin each."""
        entries, free, evicted = self.entries, self._free, []
        for _ in range(len(keys) - len(free)):
            leaving = self._policy.evict()
            if leaving is None:
                break
            free.append(entries.pop(leaving).slot)
            evicted.append(leaving)
        placed = min(len(keys), len(free))
        slots = free[len(free) - placed :]
        del free[len(free) - placed :]
        for key, slot in zip(keys, slots):
            entries[key] = Entry(slot, False, 1)
        return placed, evicted

    def blocks(self, keys: Sequence[bytes]) -> tuple[Block, ...]:
        """Of keys that are here."""
        entries, blocks = self.entries, []
        for key in keys:
            entry = entries[key]
            block = entry.block
            if block is None:
                block = entry.block = Block(key, entry.slot)
            blocks.append(block)
        return tuple(blocks)

    @property
    def free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    def restore(self, key: bytes, depth: int) -> None:
        """A block that is here from an earlier run, while there are free slots. depth: its place in its prompt."""
        self.entries[key] = Entry(self._free.pop(), landed=True)
        self._policy.insert(key, depth)

    def pin(self, keys: Iterable[bytes]) -> None:
        entries, first = self.entries, []
        for key in keys:
            entry = entries[key]
            if not entry.pins:
                first.append(key)
            entry.pins += 1
        self._policy.pin_all(first)

    def unpin(self, keys: Iterable[bytes]) -> None:
        """A block that never landed and that nobody else waits for gives its slot back. Raises ValueError if one is not
        pinned: somebody else's pin would be taken away the next time.
        """
        entries, last, void = self.entries, [], []
        for key in keys:
            entry = entries[key]
            if entry.pins > 1:
                entry.pins -= 1
                continue
            if not entry.pins:
                raise ValueError(f"block {key.hex()[:12]} is not pinned")
            entry.pins = 0
            last.append(key)
            if not entry.landed:
                void.append(key)
        self._policy.unpin_all(last)
        for key in void:
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
