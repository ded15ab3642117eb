"""Writing behind: which blocks of one node's DRAM are copied to its SSD next, and what must leave the SSD for them.

A prompt's blocks are written in order, head first: a block without its parent would never be found. No more than half
of DRAM is held up by being written at a time. Knows nothing of bytes or of other nodes.
"""

from collections import deque
from collections.abc import Collection, Sequence

from mooncake_jax.cache.tier import Block, Tier
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
        there = self._ssd.slots
        self._ssd.use([key for key in keys if key in there])
        self._waiting.append(tuple(keys))

    def next(self) -> WriteBehind:
        """What can be done now, of one prompt; `dropped` is evicted."""
        while self._waiting:
            keys = self._waiting[0]
            run, held_up = self._writable(keys)
            if not held_up:
                self._waiting.popleft()
            write = self._begin(run)
            if held_up or write.blocks or write.dropped:
                return write
        return WriteBehind()

    def _writable(self, keys: Sequence[bytes]) -> tuple[list[bytes], bool]:
        """The leading blocks that are on the SSD or can be written there now; whether others can be later."""
        run, room = [], max(self._dram.capacity // 2, 1) - self._writing
        ssd, dram, awaited = self._ssd.slots, self._dram.slots, self._dram.awaited
        for key in keys:
            if key not in ssd:
                if key not in dram or key in awaited:
                    break
                if room <= 0:
                    return run, True
                room -= 1
            run.append(key)
        return run, False

    def _begin(self, run: Sequence[bytes]) -> WriteBehind:
        """Take room on the SSD for those of a prompt's leading blocks that are not there yet."""
        there = self._ssd.slots
        depths = {key: depth for depth, key in enumerate(run) if key not in there}
        if not depths:
            return WriteBehind()
        spared = [key for key in run if key in there] if len(depths) > self._ssd.free else ()
        self._ssd.pin(spared)  # room must not cost the prompt blocks of its own
        fitting, evicted = self._ssd.admit(depths)
        self._ssd.unpin(spared)
        new = list(depths)[:fitting]
        self._dram.pin(new)
        self._writing += len(new)
        blocks = self._dram.blocks(new)
        parents = tuple([run[depths[key] - 1] if depths[key] else None for key in new])
        return WriteBehind(blocks, parents, tuple(evicted))

    def written(self, keys: Collection[bytes], stored: Collection[bytes]) -> None:
        """Those in `stored` of what was asked for are on the SSD in whole. The others could not be written: their
        prompts are not tried again before their next use.
        """
        failed = {key for key in keys if key not in stored}
        self._ssd.land([key for key in keys if key not in failed])
        self._writing -= len(keys)
        self._ssd.unpin(keys)
        self._dram.unpin(keys)
        if failed:
            still = (keys for keys in self._waiting if failed.isdisjoint(keys))
            self._waiting = deque(still, self._waiting.maxlen)

    def check(self) -> None:
        """Assert the invariants."""
        unfinished = len(self._ssd.awaited)
        assert unfinished <= self._writing, f"{unfinished} blocks of the SSD wait for {self._writing} to be written"
