"""PrefillInstance: the local scheduler of a prefill instance (report 3, steps 1 to 3).

First come first served: one prefill at a time, or as many as fill a pipeline of stages, and one that waits at its
entrance, so that it need not drain between requests (report 5.1). A request with blocks that are still on their way
into DRAM, from the SSD or from another instance, is passed over until they are here. The prefix is matched again as
the prefill starts, because requests ahead of it may have stored blocks meanwhile.
"""

from collections.abc import Iterable

from mooncake_jax.cache.pool import Block
from mooncake_jax.sched.actions import AbandonCopy, Action, FetchBlocks, PromoteBlocks, RunPrefill, Send, WriteBlocks
from mooncake_jax.sched.messages import (
    CONDUCTOR,
    BlocksPromoted,
    BlocksReplicated,
    BlocksWritten,
    Cancel,
    CopyLost,
    Message,
    PrefillDone,
    PrefillFailed,
    PrefillStarted,
    StartPrefill,
    StoreOnSSD,
)


class PrefillInstance:
    """rematch: whether the prefix is matched again as a prefill starts; else it reuses what was here as it came, or was
    brought here for it.
    """

    def __init__(self, name: str, stages: int = 1, rematch: bool = True):
        self.name, self.rematch = name, rematch
        self.most_running = 1 if stages == 1 else stages + 1
        self.queue: list[StartPrefill] = []
        self.promoting: dict[int, tuple[Block, ...]] = {}  # dispatch -> blocks being read from the SSD for it
        self.copying: dict[int, tuple[Block, ...]] = {}  # dispatch -> blocks being copied here for it
        self.running: dict[int, frozenset[int]] = {}  # dispatch -> slots that it writes
        self.landed: dict[int, bytes] = {}  # slot of the store -> key of the block whose bytes are all there
        self.matched: dict[int, int] = {}  # without rematch: dispatch -> leading blocks that it may reuse

    def handle(self, message: Message, now: float) -> list[Action]:
        match message:
            case StartPrefill():
                return [*self._enqueue(message), *self._start_next()]
            case BlocksPromoted():
                return self._arrived(message, self.promoting)
            case BlocksReplicated():
                return self._arrived(message, self.copying)
            case StoreOnSSD():
                return [WriteBlocks(message)]
            case BlocksWritten():
                return [Send(CONDUCTOR, message)]
            case CopyLost(dispatch, reason):
                return [AbandonCopy(dispatch, reason)]
            case PrefillStarted():
                return [Send(CONDUCTOR, message)]
            case PrefillDone():
                for block in message.lost:
                    self.landed.pop(block.slot, None)
                self._land(message.stored)
                self.running.pop(message.dispatch, None)
                return [Send(CONDUCTOR, message), *self._start_next()]
            case PrefillFailed():
                self.running.pop(message.dispatch, None)
                return [Send(CONDUCTOR, message), *self._start_next()]
            case Cancel(dispatch):
                return self._cancel(dispatch)
        raise TypeError(f"{self.name} cannot handle {type(message).__name__}")

    def _enqueue(self, start: StartPrefill) -> list[Action]:
        landed = self.landed
        for key, slot in start.blocks:  # Conductor has given these slots away: what they held before is void
            if landed.get(slot, key) != key:
                del landed[slot]
        self.queue.append(start)
        actions: list[Action] = []
        if start.promote:
            self.promoting[start.dispatch] = start.promote
            actions.append(PromoteBlocks(start.dispatch, start.promote))
        if start.replicate is not None:
            self.copying[start.dispatch] = start.replicate.target_blocks
            actions.append(FetchBlocks(start.dispatch, start.replicate))
        if not self.rematch:
            self.matched[start.dispatch] = self._match(start)
        return actions

    def _match(self, start: StartPrefill) -> int:
        """Leading blocks that are here, or are on their way here for this request."""
        coming = {*self.promoting.get(start.dispatch, ()), *self.copying.get(start.dispatch, ())}
        absent = (
            place
            for place, (key, slot) in enumerate(start.blocks)
            if self.landed.get(slot) != key and (key, slot) not in coming
        )
        return next(absent, len(start.blocks))

    def _arrived(
        self, message: BlocksPromoted | BlocksReplicated, awaited: dict[int, tuple[Block, ...]]
    ) -> list[Action]:
        self._land(message.blocks)
        awaited.pop(message.dispatch, None)
        return [Send(CONDUCTOR, message), *self._start_next()]

    def _land(self, blocks: Iterable[Block]) -> None:
        self.landed.update([(slot, key) for key, slot in blocks])

    def _start_next(self) -> list[Action]:
        actions: list[Action] = []
        while len(self.running) < self.most_running and (start := self._take_ready()) is not None:
            actions.append(self._run(start))
        return actions

    def _take_ready(self) -> StartPrefill | None:
        if not self.promoting and not self.copying:
            return self.queue.pop(0) if self.queue else None
        awaited = (*self.promoting.values(), *self.copying.values())
        coming = {block for blocks in awaited for block in blocks}
        for position, start in enumerate(self.queue):
            if coming.isdisjoint(start.blocks):
                return self.queue.pop(position)
        return None

    def _run(self, start: StartPrefill) -> RunPrefill:
        landed, blocks = self.landed.get, start.blocks
        absent = [place for place, (key, slot) in enumerate(blocks) if landed(slot) != key]
        reuse = self.matched.pop(start.dispatch, len(blocks))
        if absent:
            reuse = min(reuse, absent[0])
        written = frozenset().union(*self.running.values())  # by another prompt with the same prefix
        missing = tuple([place for place in absent if blocks[place].slot not in written])
        self.running[start.dispatch] = frozenset([blocks[place].slot for place in missing])
        return RunPrefill(start.dispatch, start.request, start.decoding, start.blocks, reuse, missing)

    def _cancel(self, dispatch: int) -> list[Action]:
        """Drop it from the queue; one that runs already is left to end by itself."""
        for position, start in enumerate(self.queue):
            if start.dispatch == dispatch:
                del self.queue[position]
                self.matched.pop(dispatch, None)
                return [Send(CONDUCTOR, PrefillFailed(dispatch, self.name, "cancelled"))]
        return []

    def check(self) -> None:
        """Assert the invariants."""
        queued = [start.dispatch for start in self.queue]
        assert len(set(queued)) == len(queued), f"{self.name}: a dispatch is queued twice"
        assert self.rematch or self.matched.keys() == set(queued), f"{self.name}: matched are not those that are queued"
        assert self.running.keys().isdisjoint(queued), f"{self.name}: of {queued}, queued, {list(self.running)} run"
        assert len(self.running) <= self.most_running, f"{self.name}: {list(self.running)} run at once"
        written = [slot for slots in self.running.values() for slot in slots]
        assert len(set(written)) == len(written), f"{self.name}: a slot is written twice at once"
