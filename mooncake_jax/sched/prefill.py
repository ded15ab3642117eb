"""PrefillInstance: the local scheduler of a prefill instance (report 3, steps 1 to 3).

First come first served, one prefill at a time; a request with blocks that are still on their way from another
instance is passed over until they are here. The prefix is matched again as the prefill starts, because requests ahead
of it may have stored blocks meanwhile.
"""

from mooncake_jax.cache.pool import Block
from mooncake_jax.sched.messages import (
    CONDUCTOR,
    AbandonCopy,
    Action,
    BlocksReplicated,
    Cancel,
    CopyBlocks,
    CopyLost,
    Message,
    PrefillDone,
    PrefillFailed,
    PrefillStarted,
    ReplicateBlocks,
    RunPrefill,
    Send,
    StartPrefill,
)


class PrefillInstance:
    def __init__(self, name: str):
        self.name = name
        self.queue: list[StartPrefill] = []
        self.coming: dict[int, tuple[Block, ...]] = {}  # dispatch -> blocks being copied here for it
        self.running: int | None = None
        self.landed: dict[int, bytes] = {}  # slot of the store -> key of the block whose bytes are all there

    def handle(self, message: Message, now: float) -> list[Action]:
        match message:
            case StartPrefill():
                self._enqueue(message)
                return self._start_next()
            case BlocksReplicated():
                self.landed.update((block.slot, block.key) for block in message.blocks)
                self.coming.pop(message.dispatch, None)
                return [Send(CONDUCTOR, message), *self._start_next()]
            case ReplicateBlocks(dispatch, to, source, target):
                return [CopyBlocks(dispatch, to, source, target)]
            case CopyLost(dispatch, reason):
                return [AbandonCopy(dispatch, reason)]
            case PrefillStarted():
                return [Send(CONDUCTOR, message)]
            case PrefillDone():
                for block in message.lost:
                    self.landed.pop(block.slot, None)
                self.landed.update((block.slot, block.key) for block in message.stored)
                self.running = None
                return [Send(CONDUCTOR, message), *self._start_next()]
            case PrefillFailed():
                self.running = None
                return [Send(CONDUCTOR, message), *self._start_next()]
            case Cancel(dispatch):
                return self._cancel(dispatch)
        raise TypeError(f"{self.name} cannot handle {type(message).__name__}")

    def _enqueue(self, start: StartPrefill) -> None:
        for block in start.blocks:  # Conductor has given these slots away: what they held before is void
            if self.landed.get(block.slot) != block.key:
                self.landed.pop(block.slot, None)
        self.queue.append(start)
        if start.coming:
            self.coming[start.dispatch] = start.coming

    def _start_next(self) -> list[Action]:
        if self.running is not None:
            return []
        coming = {block for blocks in self.coming.values() for block in blocks}
        for position, start in enumerate(self.queue):
            if coming.isdisjoint(start.blocks):
                del self.queue[position]
                return [self._run(start)]
        return []

    def _run(self, start: StartPrefill) -> RunPrefill:
        here = [self.landed.get(block.slot) == block.key for block in start.blocks]
        reuse = here.index(False) if False in here else len(here)
        missing = tuple(index for index, landed in enumerate(here) if not landed)
        self.running = start.dispatch
        return RunPrefill(start.dispatch, start.request, start.decoding, start.blocks, reuse, missing)

    def _cancel(self, dispatch: int) -> list[Action]:
        """Drop it from the queue; one that runs already is left to end by itself."""
        for position, start in enumerate(self.queue):
            if start.dispatch == dispatch:
                del self.queue[position]
                return [Send(CONDUCTOR, PrefillFailed(dispatch, self.name, "cancelled"))]
        return []

    def check(self) -> None:
        """Assert the invariants."""
        queued = [start.dispatch for start in self.queue]
        assert len(set(queued)) == len(queued), f"{self.name}: a dispatch is queued twice"
        assert self.running not in queued, f"{self.name}: {self.running} is queued and running"
