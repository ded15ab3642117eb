"""The SSD tier of one stage of a prefill instance: promotion into its DRAM, and writing behind (report 3, figure 3).

Each stage keeps its own layers of a block. Does what Conductor's pool has decided and says what became of it; a fault
of the disk is an answer like any other. Reads land in the slots of DRAM themselves, which the pool keeps pinned until
it is told of their end, however long the disk takes.
"""

import threading
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
        self._reading.submit(self._answer_promotion, action)

    def write(self, order: StoreOnSSD) -> None:
        self._writing.submit(self._answer_order, order)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Blocks that only some stages have kept."""
        self._writing.submit(self._delete, keys)

    def close(self, deadline_s: float) -> None:
        """Let what is being written end, for so long at most; a disk that stands still is left to itself."""
        wait([self._writing.submit(int)], deadline_s)
        closing = threading.Thread(target=self._ssd.close, name="close the SSD tier", daemon=True)
        closing.start()
        closing.join(deadline_s)

    def _answer_promotion(self, action: PromoteBlocks) -> None:
        """Whatever happens: the blocks are pinned until then."""
        try:
            read, reason = self._promote(action)
        except Exception as error:
            read, reason = (), _unexpected(error)
        self._report(StagePromoted(action.dispatch, self._stage, read, reason))

    def _answer_order(self, order: StoreOnSSD) -> None:
        try:
            written, reason = self._write(order)
        except Exception as error:
            written, reason = (), _unexpected(error)
        if order.blocks:
            self._report(StageWritten(order.number, self._stage, written, reason))

    def _promote(self, action: PromoteBlocks) -> tuple[tuple[Block, ...], str | None]:
        self._store.claim(action.blocks)
        layers = range(self._store.layout.layers)
        reads = [self._ssd.read(block.key, layers, self._store.block(block.slot)) for block in action.blocks]
        done, reason = _ended(action.blocks, reads)
        return tuple(block for block in done if self._adopt(block)), reason

    def _adopt(self, block: Block) -> bool:
        sums = self._ssd.sums(block.key)
        if sums is not None:
            self._store.adopt(block, sums)
        return sums is not None

    def _write(self, order: StoreOnSSD) -> tuple[tuple[bytes, ...], str | None]:
        self._delete(order.dropped)  # first, for they leave the room that the others need
        writes = [
            self._ssd.put(block.key, self._store.block(block.slot), parent, self._store.sums(block.slot))
            for block, parent in zip(order.blocks, order.parents)
        ]
        done, reason = _ended(order.blocks, writes)
        return tuple(block.key for block in done), reason

    def _delete(self, keys: Iterable[bytes]) -> None:
        wait([self._ssd.delete(key) for key in keys])


def _unexpected(error: Exception) -> str:
    return f"SSD tier: {type(error).__name__}: {' '.join(str(error).split())}"


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
