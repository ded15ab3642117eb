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

from mooncake_jax.cache.lru import LRU

_SPARE = 64  # stale heap entries that are never worth a sweep


class EvictionPolicy(Protocol):
    """The order in which the blocks of one pool leave. Keys are hashable; each is in at most once."""

    def insert(self, key: Hashable, depth: int) -> None:
        """A block that was not there came in. depth: its place in its prompt, from 0."""

    def use(self, key: Hashable) -> None:
        """A block that is there was found by a prompt. Raises KeyError if it is not there; so do the others below."""

    def remove(self, key: Hashable) -> None:
        """A block left for another reason than eviction, pinned or not."""

    def pin(self, key: Hashable) -> None:
        """Do not evict this block until unpin(). It keeps its place in the order, which use() may change meanwhile."""

    def unpin(self, key: Hashable) -> None:
        """Undo pin(). Pins are not counted here: pool entries do."""

    def insert_all(self, depths: Mapping[Hashable, int]) -> None:
        """insert() blocks of a prompt, which are given with their places from the first on: from the last to the
        first.
        """

    def use_prompt(self, keys: Sequence[Hashable], new: Collection[Hashable]) -> None:
        """insert() those of a prompt's leading blocks that are new and use() the others, from the last to the first."""

    def pin_all(self, keys: Iterable[Hashable]) -> None:
        """pin() each."""

    def unpin_all(self, keys: Iterable[Hashable]) -> None:
        """unpin() each."""

    def evict(self) -> Hashable | None:
        """Take the unpinned block that leaves first out and return it; None if there is none."""

    def evict_many(self, count: int) -> list[Hashable]:
        """evict() so many, or as many as there are."""

    def check(self) -> None:
        """Assert the invariants."""


class _Each:
    """Many blocks at once, one after another."""

    def insert_all(self, depths: Mapping[Hashable, int]) -> None:
        for key in reversed(depths):
            self.insert(key, depths[key])

    def use_prompt(self, keys: Sequence[Hashable], new: Collection[Hashable]) -> None:
        new = set(new)
        for depth in range(len(keys) - 1, -1, -1):
            if keys[depth] in new:
                self.insert(keys[depth], depth)
            else:
                self.use(keys[depth])

    def pin_all(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            self.pin(key)

    def unpin_all(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            self.unpin(key)

    def evict_many(self, count: int) -> list[Hashable]:
        evicted: list[Hashable] = []
        while len(evicted) < count and (key := self.evict()) is not None:
            evicted.append(key)
        return evicted


class _Ranked(_Each):
    """What all but LRU share. A rank is never given twice: it ends in a tick."""

    def __init__(self):
        self._ranks: dict[Hashable, Any] = {}  # of all blocks
        self._pinned: set[Hashable] = set()
        # (rank, key); stale unless it is the rank of an unpinned block. Equal entries may be in twice.
        self._heap: list[tuple[Any, Hashable]] = []
        self._ticks = 0

    def use(self, key: Hashable) -> None:
        self._ranks[key]  # KeyError

    def remove(self, key: Hashable) -> None:
        self._take_out(key)
        self._pinned.discard(key)

    def pin(self, key: Hashable) -> None:
        self._ranks[key]  # KeyError
        self._pinned.add(key)

    def unpin(self, key: Hashable) -> None:
        self._pinned.remove(key)
        self._push(key)  # its entry, if it was met meanwhile, is gone

    def evict(self) -> Hashable | None:
        key = self._pop()
        if key is not None:
            self._take_out(key)
        return key

    def check(self) -> None:
        assert self._pinned <= self._ranks.keys(), "a block that is not there is pinned"
        due = {(rank, key) for key, rank in self._ranks.items() if key not in self._pinned}
        assert due <= set(self._heap), "an unpinned block can never be evicted"
        assert len(self._heap) <= 2 * len(self._ranks) + _SPARE, "stale entries are not swept out"

    def _tick(self) -> int:
        self._ticks += 1
        return self._ticks

    def _set(self, key: Hashable, rank: Any) -> None:
        self._ranks[key] = rank
        if key not in self._pinned:
            self._push(key)

    def _take_out(self, key: Hashable) -> None:
        del self._ranks[key]
        self._sweep()

    def _push(self, key: Hashable) -> None:
        heapq.heappush(self._heap, (self._ranks[key], key))
        self._sweep()

    def _pop(self) -> Hashable | None:
        """The unpinned block of the lowest rank, whose entry is gone then."""
        while self._heap:
            rank, key = heapq.heappop(self._heap)
            if self._ranks.get(key) == rank and key not in self._pinned:
                return key
        return None

    def _sweep(self) -> None:
        # Pays for itself: since the last time there were about as many calls as there are blocks.
        if len(self._heap) > 2 * len(self._ranks) + _SPARE:
            self._heap = [(rank, key) for key, rank in self._ranks.items() if key not in self._pinned]
            heapq.heapify(self._heap)


class LFU(_Ranked):
    """Least often used, among those least recently. Uses count since the block came in: what left is forgotten."""

    def insert(self, key: Hashable, depth: int) -> None:
        self._set(key, (1, self._tick()))

    def use(self, key: Hashable) -> None:
        uses, _ = self._ranks[key]
        self._set(key, (uses + 1, self._tick()))


class LengthAware(_Ranked):
    """Least often used as in LFU, among those the deepest in its prompt, among those the least recently used."""

    def insert(self, key: Hashable, depth: int) -> None:
        self._set(key, (1, -depth, self._tick()))

    def use(self, key: Hashable) -> None:
        uses, height, _ = self._ranks[key]
        self._set(key, (uses + 1, height, self._tick()))


class FIFO(_Ranked):
    """First in, first out."""

    def insert(self, key: Hashable, depth: int) -> None:
        self._set(key, self._tick())


class Sieve(_Ranked):
    """SIEVE (NSDI '24): a hand goes round from the oldest block to the newest. What was used since it came in or since
    the hand last passed stays where it is; the first that was not is evicted. The hand passes over pinned blocks and
    leaves them as they are.
    """

    def __init__(self):
        super().__init__()
        self._used: set[Hashable] = set()
        self._hand = (0, 0)  # rounds begun, and the place it has come to; a block's rank says when it will get there

    def insert(self, key: Hashable, depth: int) -> None:
        self._set(key, (self._hand[0], self._tick()))

    def use(self, key: Hashable) -> None:
        super().use(key)
        self._used.add(key)

    def remove(self, key: Hashable) -> None:
        super().remove(key)
        self._used.discard(key)

    def unpin(self, key: Hashable) -> None:
        (rounds, reached), (_, place) = self._hand, self._ranks[key]
        self._ranks[key] = (rounds if place > reached else rounds + 1, place)  # the hand may have passed over it
        super().unpin(key)

    def evict(self) -> Hashable | None:
        while (key := self._pop()) is not None:
            self._hand = rounds, place = self._ranks[key]
            if key not in self._used:
                self._take_out(key)
                return key
            self._used.remove(key)
            self._set(key, (rounds + 1, place))
        return None

    def check(self) -> None:
        super().check()
        assert self._used <= self._ranks.keys(), "a block that is not there counts as used"
        ahead = [rank > self._hand for key, rank in self._ranks.items() if key not in self._pinned]
        assert all(ahead), "the hand has passed an unpinned block that it took neither out nor up again"


class Optimal(_Ranked):
    """Belady's: what is used again latest leaves first, among those (never again, say) the least recently used. A bound
    for other policies, in hindsight only. next_use: when the block that insert() or use() is told of will be used
    again, on any clock; math.inf if never. Looked up in that call.
    """

    def __init__(self, next_use: Mapping[Hashable, float]):
        super().__init__()
        self._next_use = next_use

    def insert(self, key: Hashable, depth: int) -> None:
        self._set(key, (-self._next_use[key], self._tick()))

    def use(self, key: Hashable) -> None:
        super().use(key)
        self._set(key, (-self._next_use[key], self._tick()))


# What needs no future, by the names of the command line.
POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LRU,
    "lfu": LFU,
    "length": LengthAware,
    "fifo": FIFO,
    "sieve": Sieve,
}
