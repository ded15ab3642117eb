"""LRU: the block that was not used for longest leaves first (eviction.py says what policies share).

Blocks are used by the prompt, and so remembered by the prompt: a use costs little for each of its blocks, and an
eviction passes over those that were used again since. Every call costs O(1) amortised for each block, whatever is
pinned, but for pinned ones that an eviction has met: O(log n) as they are unpinned.
"""

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from mooncake_jax.cache.entry import Entry

_SPARE = 64  # stale entries that are never worth a sweep
_NONE = 0  # no use: of a block that is not here, or was passed


class LRU:
    """Least recently used. Its order is that of uses, so that it needs no ranks: all blocks of a use have its tick
    (Entry.used), and a use that is not the block's latest is stale. In front of them are those pinned ones that an
    eviction has passed over, with their places.
    """

    def __init__(self):
        self._uses: deque[tuple[int, list[Entry]]] = deque()  # by tick; the last block of each leaves first
        self._told = 0  # blocks in them, the stale ones too
        self._latest = 0  # of these, those that are not stale
        self._ticks = 0
        self._passed: dict[Entry, int] = {}
        self._passes = 0
        # A heap of those passed that are unpinned again, and stale entries.
        self._first: list[tuple[int, Entry]] = []

    def insert(self, entry: Entry, depth: int) -> None:
        self.use_prompt((entry,), (entry,))

    def use(self, entry: Entry) -> None:
        self._has(entry)
        self.use_prompt((entry,), ())

    def insert_all(self, entries: Sequence[Entry], depths: Sequence[int]) -> None:
        self.use_prompt(entries, entries)

    def use_prompt(self, entries: Sequence[Entry], new: Collection[Entry]) -> None:
        if self._passed:
            for entry in entries:
                if self._passed.pop(entry, None) is not None:
                    self._latest += 1
        self._ticks = tick = self._ticks + 1
        for entry in entries:
            entry.used = tick
        self._uses.append((tick, list(entries)))
        self._told += len(entries)
        self._latest += len(new)
        self._sweep()

    def unpinned(self, entries: Iterable[Entry]) -> None:
        if not self._passed:
            return
        for entry in entries:
            if entry in self._passed:
                heapq.heappush(self._first, (self._passed[entry], entry))
        if len(self._first) > 2 * len(self._passed) + _SPARE:
            self._first = [(place, entry) for entry, place in self._passed.items() if not entry.pins]
            heapq.heapify(self._first)

    def remove(self, entry: Entry) -> None:
        self._has(entry)
        if self._passed.pop(entry, None) is None:
            entry.used = _NONE
            self._latest -= 1
            self._sweep()

    def _has(self, entry: Entry) -> None:
        if entry.used == _NONE and entry not in self._passed:
            raise KeyError(entry.key)

    def evict(self) -> Entry | None:
        evicted = self.evict_many(1)
        return evicted[0] if evicted else None

    def evict_many(self, count: int) -> list[Entry]:
        evicted: list[Entry] = []
        while self._first and len(evicted) < count:
            place, entry = heapq.heappop(self._first)
            if self._passed.get(entry) == place and not entry.pins:
                del self._passed[entry]
                evicted.append(entry)
        while self._uses and len(evicted) < count:
            tick, entries = self._uses[0]
            self._take(tick, entries, count, evicted)
            if not entries:
                self._uses.popleft()
        self._sweep()
        return evicted

    def _take(self, tick: int, entries: list[Entry], count: int, evicted: list[Entry]) -> None:
        """Of the oldest use, until so many are evicted."""
        told = len(entries)
        while entries and len(evicted) < count:
            entry = entries.pop()
            if entry.used != tick:
                continue
            entry.used = _NONE
            self._latest -= 1
            if entry.pins:
                self._passes += 1
                self._passed[entry] = self._passes
            else:
                evicted.append(entry)
        self._told -= told - len(entries)

    def _sweep(self) -> None:
        if self._told > 2 * self._latest + _SPARE:
            uses = [(tick, [entry for entry in entries if entry.used == tick]) for tick, entries in self._uses]
            self._uses = deque([use for use in uses if use[1]])
            self._told = self._latest

    def check(self) -> None:
        assert not any(entry.used for entry in self._passed), "a block has two places"
        due = {(place, entry) for entry, place in self._passed.items() if not entry.pins}
        assert due <= set(self._first), "an unpinned block can never be evicted"
        told = [(tick, entry) for tick, entries in self._uses for entry in entries]
        assert len(told) == self._told, "uses are counted wrongly"
        assert len({entry for tick, entry in told if entry.used == tick}) == self._latest, "blocks are counted wrongly"
        assert self._told <= 2 * self._latest + _SPARE, "stale uses are not swept out"
