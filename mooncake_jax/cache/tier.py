"""One tier of one node's part of the KVCache pool: which blocks are in it, and which leave (report 3, figure 3).

A tier is a number of slots. In DRAM a slot is a place in the node's slab; on the SSD, where blocks lie by their keys,
only the number of slots matters. A block *lands* once all its bytes are in the tier; until then, and while somebody
reads it, it is pinned and cannot leave. Knows nothing of other tiers and nodes.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from mooncake_jax.cache.eviction import EvictionPolicy


class Block(NamedTuple):
    """One KVCache block on one node: its key and the slot of that node's DRAM it lies, or will lie, in."""

    key: bytes
    slot: int


_block = partial(tuple.__new__, Block)  # as Block._make, in half its time


class Tier:
    """slots: of the blocks, by key; awaited: those of them that have not landed; pins: of those that are pinned. The
    policy knows the same keys, and which of them are pinned. The latter two are small, and near at hand for a processor
    too: what can be told by them should be.
    """

    def __init__(self, slots: int, policy: EvictionPolicy):
        self.capacity = slots
        self.slots: dict[bytes, int] = {}
        self.awaited: dict[bytes, int] = {}  # with their slots
        self.pins: dict[bytes, int] = {}
        self._policy = policy
        self._free = list(range(slots - 1, -1, -1))

    def has_landed(self, key: bytes) -> bool:
        return key in self.slots and key not in self.awaited

    def reserve(self, keys: Sequence[bytes]) -> tuple[int, list[bytes]]:
        """Pin a prompt's leading blocks, those here and those to come, and tell the policy of their use.

        Returns how many leading ones found room, and which blocks were evicted for them. Raises ValueError, with
        nothing changed, if a key comes twice: it stands for all blocks up to its own, so such keys are no prompt's.
        """
        if len(set(keys)) < len(keys):
            twice = next(key for place, key in enumerate(keys) if key in keys[:place])
            raise ValueError(f"block {twice.hex()[:12]} comes twice in a prompt; its keys must be chained")
        there = [key for key in keys if key in self.slots]
        self.pin(there)  # before room is made, which must not cost the prompt blocks of its own
        if len(there) == len(keys):
            self._policy.use_prompt(keys, ())
            return len(keys), []
        new = [key for key in keys if key not in self.slots]
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
        held, free, evicted = self.slots, self._free, []
        if len(keys) > len(free):
            evicted = self._policy.evict_many(len(keys) - len(free))
            free += map(held.pop, evicted)
        placed = min(len(keys), len(free))
        slots = free[len(free) - placed :]
        del free[len(free) - placed :]
        new = keys[:placed]
        held.update(zip(new, slots))
        self.awaited.update(zip(new, slots))
        self.pins.update(dict.fromkeys(new, 1))
        return placed, evicted

    def blocks(self, keys: Sequence[bytes]) -> tuple[Block, ...]:
        """Of keys that are here."""
        return tuple(map(_block, zip(keys, map(self.slots.__getitem__, keys))))

    @property
    def free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    def restore(self, key: bytes, depth: int) -> None:
        """A block that is here from an earlier run, while there are free slots. depth: its place in its prompt."""
        self.slots[key] = self._free.pop()
        self._policy.insert(key, depth)

    def land(self, keys: Iterable[bytes]) -> None:
        """All bytes of these blocks, which were awaited, are here."""
        for key in keys:
            del self.awaited[key]

    def pin(self, keys: Collection[bytes]) -> None:
        """Of keys that are here."""
        pins = self.pins
        for key in keys:
            pins[key] = pins.get(key, 0) + 1
        self._policy.pin_all(keys)

    def unpin(self, keys: Iterable[bytes]) -> None:
        """A block that never landed and that nobody else waits for gives its slot back. Raises ValueError if one is not
        pinned: somebody else's pin would be taken away the next time.
        """
        pins, last = self.pins, []
        for key in keys:
            held = pins.pop(key, 0)
            if held == 1:
                last.append(key)
            elif held:
                pins[key] = held - 1
            else:
                raise ValueError(f"block {key.hex()[:12]} is not pinned")
        self._policy.unpin_all(last)
        for key in [key for key in last if key in self.awaited]:
            self._discard(key)

    def lose(self, key: bytes) -> None:
        """A block turned out unreadable: it is as if it had never landed."""
        self.awaited[key] = self.slots[key]
        if key not in self.pins:
            self._discard(key)

    def _discard(self, key: bytes) -> None:
        slot = self.slots[key]
        self._policy.remove(key)
        del self.awaited[key], self.slots[key]
        self._free.append(slot)

    def check(self) -> None:
        """Assert the invariants: each slot is used once or free, what is pinned is here, nothing unpinned is half-
        written.
        """
        slots = [*self.slots.values(), *self._free]
        assert sorted(slots) == list(range(self.capacity)), "slots leaked or used twice"
        self._policy.check()
        assert self.pins.keys() <= self.slots.keys(), "a block that is not there is pinned"
        assert all(pins > 0 for pins in self.pins.values()), "a block has no pins, and is counted among those that have"
        assert self.awaited.keys() <= self.pins.keys(), "a block is unpinned and not landed"
        assert self.awaited.items() <= self.slots.items(), "a block is awaited in another slot than its own"
