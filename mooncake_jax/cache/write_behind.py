"""Writing behind: which blocks of one node's DRAM are copied to its SSD next, and what must leave the SSD for them.

A prompt's blocks are written in order, head first: a block without its parent would never be found. No more than half
of DRAM is held up by being written at a time. Knows nothing of bytes or of other nodes.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence

from mooncake_jax.cache.entry import Block, Entry
from mooncake_jax.cache.tier import Tier
from mooncake_jax.records import record

MOST_WAITING = 1000  # prompts; an SSD that has fallen so far behind gives up the oldest


@record
class WriteBehind:
    """What a node is to do on its SSD: forget `dropped`, then write `blocks`, whose parents' keys are given too."""

    blocks: tuple[Block, ...] = ()
    parents: tuple[bytes | None, ...] = ()
    dropped: tuple[bytes, ...] = ()


class Backlog:
    """Of one node. Blocks that are being written are pinned in both tiers."""

    def __init__(self, dram: Tier, ssd: Tier):
        self._dram, self._ssd = dram, ssd
        self._waiting: deque[tuple[bytes, ...]] = deque(maxlen=MOST_WAITING)  # prompts
        self._writing = 0  # blocks

    def add(self, keys: Sequence[bytes]) -> None:
        """A prompt was used: what of it is only in DRAM waits for its turn."""
        there = self._ssd.entries.get
        self._ssd.use([entry for key in keys if (entry := there(key)) is not None])
        self._waiting.append(tuple(keys))

    def next(self) -> WriteBehind:
        """What can be done now, of one prompt; `dropped` is evicted."""
        while self._waiting:
            keys = self._waiting[0]
            new, upto, held_up = self._writable(keys)
            if not held_up:
                self._waiting.popleft()
            write = self._begin(keys[:upto], new) if new else WriteBehind()
            if held_up or write.blocks or write.dropped:
                return write
        return WriteBehind()

    def _writable(self, keys: Sequence[bytes]) -> tuple[dict[int, Entry], int, bool]:
        """Of the leading blocks that are on the SSD or can be written there now: those that are not there yet, in DRAM,
        by their place; how many leading ones; whether others can be later.
        """
        new, room = {}, max(self._dram.capacity // 2, 1) - self._writing
        ssd, dram = self._ssd.entries, self._dram.entries.get
        for place, key in enumerate(keys):
            if key in ssd:
                continue
            entry = dram(key)
            if entry is None or not entry.landed:
                return new, place, False
            if len(new) >= room:
                return new, place, True
            new[place] = entry
        return new, len(keys), False

    def _begin(self, run: Sequence[bytes], new: Mapping[int, Entry]) -> WriteBehind:
        """Take room on the SSD for those of a prompt's leading blocks that are not there yet, given by their place."""
        places = list(new)
        spared = [key for place, key in enumerate(run) if place not in new] if len(new) > self._ssd.free else ()
        self._ssd.pin(map(self._ssd.entries.__getitem__, spared))  # room must not cost the prompt blocks of its own
        fitting, evicted = self._ssd.admit([run[place] for place in places], places)
        self._ssd.unpin(spared)
        written = list(new.values())[: len(fitting)]
        self._dram.pin(written)
        self._writing += len(written)
        parents = tuple([run[place - 1] if place else None for place in places[: len(written)]])
        return WriteBehind(tuple([entry.block or entry.told() for entry in written]), parents, tuple(evicted))

    def written(self, keys: Collection[bytes], stored: Collection[bytes]) -> None:
        """Those in `stored` of what was asked for are on the SSD in whole. The others could not be written: their
        prompts are not tried again before their next use.
        """
        failed = {key for key in keys if key not in stored}
        there = self._ssd.entries
        self._ssd.land([there[key] for key in keys if key not in failed])
        self._writing -= len(keys)
        self._ssd.unpin(keys)
        self._dram.unpin(keys)
        if failed:
            still = (keys for keys in self._waiting if failed.isdisjoint(keys))
            self._waiting = deque(still, self._waiting.maxlen)

    def check(self) -> None:
        """Assert the invariants."""
        unfinished = self._ssd.awaited
        assert unfinished <= self._writing, f"{unfinished} blocks of the SSD wait for {self._writing} to be written"
