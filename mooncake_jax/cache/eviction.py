"""Eviction policies of a pool of KVCache blocks: which block leaves first (report 4.2, table 1).

    policy   leaves first                                            among equals             heads outlive tails
    lru      least recently used                                     (none are equal)         yes
    lfu      least often used since it came in                       least recently used      yes
    length   least often used since it came in                       the deepest in its       yes
             (the report's LengthAwareCache)                         prompt, then as lru
    fifo     first come in                                           (none are equal)         within one prompt only
    sieve    the first that was not used since the hand passed       (none are equal)         within one prompt only
    optimal  used again latest                                       least recently used      yes

The report says neither how equals are told apart nor whether uses still count after an eviction. Here they do not: a
pool that remembered every block it ever held would grow for ever.

A block whose parent has left is never found, so the head of a chain must outlive its tail. Policies know no chains:
it follows from the order that a prompt's blocks are told in, *from the last to the first*, so that a head counts as
used after its tail. Then lru, lfu, length and optimal evict no block before its children, as long as all of a prompt's
leading blocks are told whenever one is, and pins cover whole prefixes. With fifo and sieve only the blocks that came
in together leave from the tail: a head that came in with an earlier prompt may leave before what was added to it.

Every policy but lru, whose order is that of uses, is a rank for each block, the lowest of which leaves first, in a heap
whose stale entries are passed over when met and swept out when they outnumber the others. Every call costs O(log n)
amortised for each block, whatever is pinned.

Knows nothing of capacities, bytes or tiers.
"""

import heapq
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from mooncake_jax.cache.entry import Entry
from mooncake_jax.cache.lru import LRU

_SPARE = 64  # stale heap entries that are never worth a sweep


class EvictionPolicy(Protocol):
    """The order in which the blocks of one pool leave. Each is in at most once. None with pins is evicted: it keeps its
    place in the order, which use() may change meanwhile.
    """

    def insert(self, entry: Entry, depth: int) -> None:
        """A block that was not there came in. depth: its place in its prompt, from 0."""

    def use(self, entry: Entry) -> None:
        """A block that is there was found by a prompt. Raises KeyError if it is not there; so does remove()."""

    def remove(self, entry: Entry) -> None:
        """A block left for another reason than eviction, pinned or not."""

    def insert_all(self, entries: Sequence[Entry], depths: Sequence[int]) -> None:
        """insert() blocks of a prompt, which are given from the first on: from the last to the first."""

    def use_prompt(self, entries: Sequence[Entry], new: Collection[Entry]) -> None:
        """insert() those of a prompt's leading blocks that are new and use() the others, from the last to the first."""

    def unpinned(self, entries: Iterable[Entry]) -> None:
        """The last pins of these blocks, which are there, were taken away."""

    def evict(self) -> Entry | None:
        """Take the block without pins that leaves first out and return it; None if there is none."""

    def evict_many(self, count: int) -> list[Entry]:
        """evict() so many, or as many as there are."""

    def check(self) -> None:
        """Assert the invariants."""


class _Ranked:
    """What all but LRU share. A rank is never given twice: it ends in a tick."""

    def __init__(self):
        self._ranks: dict[Entry, Any] = {}  # of all blocks
        # (rank, entry); stale unless it is the rank of an unpinned block. Equal ones may be in twice.
        self._heap: list[tuple[Any, Entry]] = []
        self._ticks = 0

    def use(self, entry: Entry) -> None:
        self._ranks[entry]  # KeyError

    def remove(self, entry: Entry) -> None:
        self._take_out(entry)

    def insert_all(self, entries: Sequence[Entry], depths: Sequence[int]) -> None:
        for entry, depth in zip(reversed(entries), reversed(depths[: len(entries)])):
            self.insert(entry, depth)

    def use_prompt(self, entries: Sequence[Entry], new: Collection[Entry]) -> None:
        new = set(new)
        for depth in range(len(entries) - 1, -1, -1):
            if entries[depth] in new:
                self.insert(entries[depth], depth)
            else:
                self.use(entries[depth])

    def unpinned(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._push(entry)  # what was pushed before is gone, if it was met meanwhile

    def evict(self) -> Entry | None:
        entry = self._pop()
        if entry is not None:
            self._take_out(entry)
        return entry

    def evict_many(self, count: int) -> list[Entry]:
        evicted: list[Entry] = []
        while len(evicted) < count and (entry := self.evict()) is not None:
            evicted.append(entry)
        return evicted

    def check(self) -> None:
        due = {(rank, entry) for entry, rank in self._ranks.items() if not entry.pins}
        assert due <= set(self._heap), "an unpinned block can never be evicted"
        assert len(self._heap) <= 2 * len(self._ranks) + _SPARE, "stale entries are not swept out"

    def _tick(self) -> int:
        self._ticks += 1
        return self._ticks

    def _set(self, entry: Entry, rank: Any) -> None:
        self._ranks[entry] = rank
        if not entry.pins:
            self._push(entry)

    def _take_out(self, entry: Entry) -> None:
        del self._ranks[entry]
        self._sweep()

    def _push(self, entry: Entry) -> None:
        heapq.heappush(self._heap, (self._ranks[entry], entry))
        self._sweep()

    def _pop(self) -> Entry | None:
        """The unpinned block of the lowest rank, whose entry is gone then."""
        while self._heap:
            rank, entry = heapq.heappop(self._heap)
            if self._ranks.get(entry) == rank and not entry.pins:
                return entry
        return None

    def _sweep(self) -> None:
        # Pays for itself: since the last time there were about as many calls as there are blocks.
        if len(self._heap) > 2 * len(self._ranks) + _SPARE:
            self._heap = [(rank, entry) for entry, rank in self._ranks.items() if not entry.pins]
            heapq.heapify(self._heap)


class LFU(_Ranked):
    """Least often used, among those least recently. Uses count since the block came in: what left is forgotten."""

    def insert(self, entry: Entry, depth: int) -> None:
        self._set(entry, (1, self._tick()))

    def use(self, entry: Entry) -> None:
        uses, _ = self._ranks[entry]
        self._set(entry, (uses + 1, self._tick()))


class LengthAware(_Ranked):
    """Least often used as in LFU, among those the deepest in its prompt, among those the least recently used."""

    def insert(self, entry: Entry, depth: int) -> None:
        self._set(entry, (1, -depth, self._tick()))

    def use(self, entry: Entry) -> None:
        uses, height, _ = self._ranks[entry]
        self._set(entry, (uses + 1, height, self._tick()))


class FIFO(_Ranked):
    """First in, first out."""

    def insert(self, entry: Entry, depth: int) -> None:
        self._set(entry, self._tick())


class Sieve(_Ranked):
    """SIEVE (NSDI '24): a hand goes round from the oldest block to the newest. What was used since it came in or since
    the hand last passed stays where it is; the first that was not is evicted. The hand passes over pinned blocks and
    leaves them as they are.
    """

    def __init__(self):
        super().__init__()
        self._used: set[Entry] = set()
        self._hand = (0, 0)  # rounds begun, and the place it has come to; a block's rank says when it will get there

    def insert(self, entry: Entry, depth: int) -> None:
        self._set(entry, (self._hand[0], self._tick()))

    def use(self, entry: Entry) -> None:
        super().use(entry)
        self._used.add(entry)

    def remove(self, entry: Entry) -> None:
        super().remove(entry)
        self._used.discard(entry)

    def unpinned(self, entries: Iterable[Entry]) -> None:
        rounds, reached = self._hand
        for entry in entries:  # the hand may have passed over it
            _, place = self._ranks[entry]
            self._ranks[entry] = (rounds if place > reached else rounds + 1, place)
        super().unpinned(entries)

    def evict(self) -> Entry | None:
        while (entry := self._pop()) is not None:
            self._hand = rounds, place = self._ranks[entry]
            if entry not in self._used:
                self._take_out(entry)
                return entry
            self._used.remove(entry)
            self._set(entry, (rounds + 1, place))
        return None

    def check(self) -> None:
        super().check()
        assert self._used <= self._ranks.keys(), "a block that is not there counts as used"
        ahead = [rank > self._hand for entry, rank in self._ranks.items() if not entry.pins]
        assert all(ahead), "the hand has passed an unpinned block that it took neither out nor up again"


class Optimal(_Ranked):
    """Belady's: what is used again latest leaves first, among those (never again, say) the least recently used. A bound
    for other policies, in hindsight only. next_use: when the block that insert() or use() is told of will be used
    again, on any clock; math.inf if never. Looked up in that call.
    """

    def __init__(self, next_use: Mapping[Hashable, float]):
        super().__init__()
        self._next_use = next_use

    def insert(self, entry: Entry, depth: int) -> None:
        self._set(entry, (-self._next_use[entry.key], self._tick()))

    def use(self, entry: Entry) -> None:
        super().use(entry)
        self._set(entry, (-self._next_use[entry.key], self._tick()))


# What needs no future, by the names of the command line.
POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LRU,
    "lfu": LFU,
    "length": LengthAware,
    "fifo": FIFO,
    "sieve": Sieve,
}
