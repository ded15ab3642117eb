"""LRU: the block that was not used for longest leaves first (eviction.py says what policies share).

Blocks are used by the prompt, and so remembered by the prompt: a use costs little for each of its blocks, and an
eviction passes over those that were used again since. Every call costs O(1) amortised for each block, whatever is
pinned, but for pinned ones that an eviction has met: O(log n) as they are unpinned.
"""

import heapq
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

_SPARE = 64  # stale entries that are never worth a sweep


class LRU:
    """Least recently used. Its order is that of uses, so that it needs no ranks: all blocks of a use have its tick, and
    a use that is not the block's latest is stale. In front of them are those pinned ones that an eviction has passed
    over, with their places.
    """

    def __init__(self):
        self._latest: dict[Hashable, int] = {}  # tick of each block's latest use, but for those passed
        self._uses: deque[tuple[int, list[Hashable]]] = deque()  # by tick; the last block of each leaves first
        self._told = 0  # blocks in them, the stale ones too
        self._ticks = 0
        self._passed: dict[Hashable, int] = {}
        self._passes = 0
        self._pinned: set[Hashable] = set()
        # A heap of those passed that are unpinned again, and stale entries.
        self._first: list[tuple[int, Hashable]] = []

    def insert(self, key: Hashable, depth: int) -> None:
        self._told_of([key])

    def use(self, key: Hashable) -> None:
        if self._passed.pop(key, None) is None:
            self._latest[key]  # KeyError
        self._told_of([key])

    def insert_all(self, depths: Mapping[Hashable, int]) -> None:
        self._told_of(list(depths))

    def use_prompt(self, keys: Sequence[Hashable], new: Collection[Hashable]) -> None:
        if self._passed:
            for key in keys:
                self._passed.pop(key, None)
        self._told_of(list(keys))

    def _told_of(self, keys: list[Hashable]) -> None:
        self._ticks += 1
        self._latest.update(dict.fromkeys(keys, self._ticks))
        self._uses.append((self._ticks, keys))
        self._told += len(keys)
        self._sweep()

    def pin_all(self, keys: Iterable[Hashable]) -> None:
        self._pinned.update(keys)

    def unpin_all(self, keys: Collection[Hashable]) -> None:
        self._pinned.difference_update(keys)
        if self._passed:
            self._come_back(keys)

    def remove(self, key: Hashable) -> None:
        if self._passed.pop(key, None) is None:
            del self._latest[key]
            self._sweep()
        self._pinned.discard(key)

    def pin(self, key: Hashable) -> None:
        if key not in self._latest:
            self._passed[key]  # KeyError
        self._pinned.add(key)

    def unpin(self, key: Hashable) -> None:
        self._pinned.remove(key)
        self._come_back((key,))

    def _come_back(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            if key in self._passed:
                heapq.heappush(self._first, (self._passed[key], key))
        if len(self._first) > 2 * len(self._passed) + _SPARE:
            self._first = [(place, key) for key, place in self._passed.items() if key not in self._pinned]
            heapq.heapify(self._first)

    def evict(self) -> Hashable | None:
        evicted = self.evict_many(1)
        return evicted[0] if evicted else None

    def evict_many(self, count: int) -> list[Hashable]:
        evicted: list[Hashable] = []
        while self._first and len(evicted) < count:
            place, key = heapq.heappop(self._first)
            if self._passed.get(key) == place and key not in self._pinned:
                del self._passed[key]
                evicted.append(key)
        while self._uses and len(evicted) < count:
            tick, keys = self._uses[0]
            self._take(tick, keys, count, evicted)
            if not keys:
                self._uses.popleft()
        self._sweep()
        return evicted

    def _take(self, tick: int, keys: list[Hashable], count: int, evicted: list[Hashable]) -> None:
        """Of the oldest use, until so many are evicted."""
        latest, pinned, told = self._latest, self._pinned, len(keys)
        while keys and len(evicted) < count:
            key = keys.pop()
            if latest.get(key) != tick:
                continue
            del latest[key]
            if key in pinned:
                self._passes += 1
                self._passed[key] = self._passes
            else:
                evicted.append(key)
        self._told -= told - len(keys)

    def _sweep(self) -> None:
        if self._told > 2 * len(self._latest) + _SPARE:
            latest = self._latest
            uses = [(tick, [key for key in keys if latest.get(key) == tick]) for tick, keys in self._uses]
            self._uses = deque([use for use in uses if use[1]])
            self._told = sum(len(keys) for _, keys in self._uses)

    def check(self) -> None:
        assert self._pinned <= self._latest.keys() | self._passed.keys(), "a block that is not there is pinned"
        assert self._latest.keys().isdisjoint(self._passed), "a block has two places"
        due = {(place, key) for key, place in self._passed.items() if key not in self._pinned}
        told = {(key, tick) for tick, keys in self._uses for key in keys}
        assert due <= set(self._first) and self._latest.items() <= told, "an unpinned block can never be evicted"
        assert sum(len(keys) for _, keys in self._uses) == self._told, "uses are counted wrongly"
        assert self._told <= 2 * len(self._latest) + _SPARE, "stale uses are not swept out"
