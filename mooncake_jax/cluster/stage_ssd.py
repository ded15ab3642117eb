"""The SSD tier of one stage of a prefill instance: promotion into its DRAM, and writing behind (report 3, figure 3).

Each stage keeps its own layers of a block. Does what Conductor's pool has decided and says what became of it; a fault
of the disk is an answer like any other. Reads land in the slots of DRAM themselves, which the pool keeps pinned until
it is told of their end, however long the disk takes.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from mooncake_jax.cache.pool import Block
from mooncake_jax.cache.ssd import Result, SSDStore, Status
from mooncake_jax.cache.store import BlockStore
from mooncake_jax.cluster.control import StagePromoted, StageWritten
from mooncake_jax.sched.actions import PromoteBlocks
from mooncake_jax.sched.messages import StoreOnSSD


class StageSSD:
    """report: called from threads of its own."""

    def __init__(
        self, stage: int, store: BlockStore, ssd: SSDStore, report: Callable[[StagePromoted | StageWritten], None]
    ):
        self._stage, self._store, self._ssd, self._report = stage, store, ssd, report
        self._reading = ThreadPoolExecutor(1, "promote")
        self._writing = ThreadPoolExecutor(1, "write-behind")

    def promote(self, action: PromoteBlocks) -> None:
        self._reading.submit(self._promote, action)

    def write(self, order: StoreOnSSD) -> None:
        self._writing.submit(self._write, order)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Blocks that only some stages have kept."""
        self._writing.submit(self._delete, keys)

    def close(self, deadline_s: float) -> None:
        """Let what is being written end, for so long at most."""
        wait([self._writing.submit(int)], deadline_s)
        self._ssd.close()

    def _promote(self, action: PromoteBlocks) -> None:
        self._store.claim(action.blocks)
        layers = range(self._store.layout.layers)
        reads = [self._ssd.read(block.key, layers, self._store.block(block.slot)) for block in action.blocks]
        done, reason = _ended(action.blocks, reads)
        read = tuple(block for block in done if self._adopt(block))
        self._report(StagePromoted(action.dispatch, self._stage, read, reason))

    def _adopt(self, block: Block) -> bool:
        sums = self._ssd.sums(block.key)
        if sums is not None:
            self._store.adopt(block, sums)
        return sums is not None

    def _write(self, order: StoreOnSSD) -> None:
        self._delete(order.dropped)  # first, for they leave the room that the others need
        if not order.blocks:
            return
        writes = [
            self._ssd.put(block.key, self._store.block(block.slot), parent, self._store.sums(block.slot))
            for block, parent in zip(order.blocks, order.parents)
        ]
        done, reason = _ended(order.blocks, writes)
        self._report(StageWritten(order.number, self._stage, tuple(block.key for block in done), reason))

    def _delete(self, keys: Iterable[bytes]) -> None:
        wait([self._ssd.delete(key) for key in keys])


def _ended(blocks: Sequence[Block], futures: Sequence[Future]) -> tuple[list[Block], str | None]:
    """Those blocks with which all went well, and what went wrong first with another."""
    done, reason = [], None
    for block, future in zip(blocks, futures):
        result: Result = future.result()
        if result.status is Status.DONE:
            done.append(block)
        elif reason is None:
            reason = f"SSD tier: {result.status}" + (f", {result.reason}" if result.reason else "")
    return done, reason
