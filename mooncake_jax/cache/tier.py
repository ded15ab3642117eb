"""One tier of one node's part of the KVCache pool: which blocks are in it, and which leave (report 3, figure 3).

A tier is a number of slots. In DRAM a slot is a place in the node's slab; on the SSD, where blocks lie by their keys,
only the number of slots matters. A block *lands* once all its bytes are in the tier; until then, and while somebody
reads it, it is pinned and cannot leave. Knows nothing of other tiers and nodes.
"""

from collections.abc import Iterable, Sequence

from mooncake_jax.cache.entry import Entry
from mooncake_jax.cache.eviction import EvictionPolicy


class Tier:
    """entries: of the blocks that are here or awaited, by key; awaited: how many have not landed. The policy knows the
    same entries.
    """

    def __init__(self, slots: int, policy: EvictionPolicy):
        self.capacity = slots
        self.entries: dict[bytes, Entry] = {}
        self.awaited = 0
        self._policy = policy
        self._free = list(range(slots - 1, -1, -1))

    def has_landed(self, key: bytes) -> bool:
        entry = self.entries.get(key)
        return entry is not None and entry.landed

    def landed(self, keys: Iterable[bytes]) -> int:
        """How many leading blocks have."""
        find, count = self.entries.get, 0
        for key in keys:
            entry = find(key)
            if entry is None or not entry.landed:
                break
            count += 1
        return count

    def reserve(self, keys: Sequence[bytes]) -> tuple[list[Entry], list[bytes]]:
        """Pin a prompt's leading blocks, those here and those to come, and tell the policy of their use.

        Returns those that found room, and which blocks were evicted for them. Raises ValueError, with nothing changed,
        if a key comes twice: it stands for all blocks up to its own, so such keys are no prompt's.
        """
        if len(set(keys)) < len(keys):
            twice = next(key for place, key in enumerate(keys) if key in keys[:place])
            raise ValueError(f"block {twice.hex()[:12]} comes twice in a prompt; its keys must be chained")
        found, new = list(map(self.entries.get, keys)), []
        for key, entry in zip(keys, found):  # pinned before room is made, which must not cost the prompt its own blocks
            if entry is None:
                new.append(key)
            else:
                entry.pins += 1
        if not new:
            self._policy.use_prompt(found, ())
            return found, []
        placed, evicted = self._place(new)
        if len(placed) < len(new):
            fitting = keys.index(new[len(placed)])
            self.unpin([entry.key for entry in found[fitting:] if entry is not None])
            found = found[:fitting]
        if len(placed) == len(found):
            found = placed
        else:
            come = iter(placed)
            found = [next(come) if entry is None else entry for entry in found]
        self._policy.use_prompt(found, placed)
        return found, evicted

    def admit(self, keys: Sequence[bytes], depths: Sequence[int]) -> tuple[list[Entry], list[bytes]]:
        """Pin blocks that are to come, given with their places in one prompt, in order. Returns as reserve() does."""
        placed, evicted = self._place(keys)
        self._policy.insert_all(placed, depths)
        return placed, evicted

    def use(self, entries: list[Entry]) -> None:
        """Tell the policy of a use of a prompt's blocks, given from the first on."""
        self._policy.use_prompt(entries, ())

    def _place(self, keys: Sequence[bytes]) -> tuple[list[Entry], list[bytes]]:
        """Give slots to blocks that have none, from the first on while there is room, and a pin each. The policy is not
        told of them.
        """
        entries, free, left = self.entries, self._free, []
        if len(keys) > len(free):
            for entry in self._policy.evict_many(len(keys) - len(free)):
                left.append(entry.key)
                free.append(entry.slot)
                del entries[entry.key]
        slots = free[max(len(free) - len(keys), 0) :]
        del free[len(free) - len(slots) :]
        placed = [Entry(key, slot, False, 1) for key, slot in zip(keys, slots)]
        entries.update(zip(keys, placed))
        self.awaited += len(placed)
        return placed, left

    @property
    def free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    def restore(self, key: bytes, depth: int) -> None:
        """A block that is here from an earlier run, while there are free slots. depth: its place in its prompt."""
        self.entries[key] = entry = Entry(key, self._free.pop())
        self._policy.insert(entry, depth)

    def land(self, entries: Sequence[Entry]) -> None:
        """All bytes of these blocks, which were awaited, are here."""
        for entry in entries:
            entry.landed = True
        self.awaited -= len(entries)

    def pin(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            entry.pins += 1

    def unpin(self, keys: Iterable[bytes]) -> None:
        """A block that never landed and that nobody else waits for gives its slot back. Raises ValueError if one is not
        pinned: somebody else's pin would be taken away the next time.
        """
        find, last, void = self.entries.get, [], []
        for key in keys:
            entry = find(key)
            if entry is None or not entry.pins:
                raise ValueError(f"block {key.hex()[:12]} is not pinned")
            entry.pins -= 1
            if not entry.pins:
                last.append(entry)
                if not entry.landed:
                    void.append(entry)
        self._policy.unpinned(last)
        for entry in void:
            self._discard(entry)

    def lose(self, entry: Entry) -> None:
        """A block turned out unreadable: it is as if it had never landed."""
        entry.landed = False
        self.awaited += 1
        if not entry.pins:
            self._discard(entry)

    def _discard(self, entry: Entry) -> None:
        self._policy.remove(entry)
        del self.entries[entry.key]
        self.awaited -= 1
        self._free.append(entry.slot)

    def check(self) -> None:
        """Assert the invariants: each slot is used once or free, and nothing unpinned is half-written."""
        entries = self.entries.values()
        assert sorted([*(entry.slot for entry in entries), *self._free]) == list(range(self.capacity)), (
            "slots leaked or used twice"
        )
        self._policy.check()
        assert all(key == entry.key for key, entry in self.entries.items()), "a block is found by another's key"
        assert all(entry.pins > 0 or entry.landed for entry in entries), "a block is unpinned and not landed"
        awaited = sum(not entry.landed for entry in entries)
        assert self.awaited == awaited, f"{awaited} blocks are awaited, and counted as {self.awaited}"
