"""Reservations: which blocks of the pool are held for which dispatch, and what moves them (report 3 and 6.2).

Conductor's bookkeeping of pins. A dispatch holds the blocks of its prompt at its prefill instance until its prefill has
ended and nothing reads them from the SSD or copies them for it any more, whatever has become of its request. What its
instance is to write to the SSD behind is held apart. Knows nothing of policies, queues or endings.
"""

from dataclasses import dataclass

from mooncake_jax.cache.pool import Block, KVCachePool, WriteBehind
from mooncake_jax.records import record
from mooncake_jax.request import Request
from mooncake_jax.sched.actions import Send
from mooncake_jax.sched.decisions import Dispatch
from mooncake_jax.sched.messages import (
    BlocksPromoted,
    BlocksReplicated,
    BlocksWritten,
    PrefillDone,
    PrefillFailed,
    Replication,
    StoreOnSSD,
)


@dataclass(slots=True)
class Reservation:
    """promoting: blocks that are being read from the SSD; replication: what is being copied from another instance."""

    node: str
    blocks: tuple[Block, ...]
    promoting: tuple[Block, ...]
    replication: Replication | None
    prefilling: bool = True

    @property
    def settled(self) -> bool:
        """Whether nobody writes or reads its blocks for this dispatch any more."""
        return not self.prefilling and not self.promoting and self.replication is None


@record
class _Write:
    node: str
    blocks: tuple[Block, ...]


class Reservations:
    def __init__(self, pool: KVCachePool):
        self._pool = pool
        self._open: dict[int, Reservation] = {}  # by dispatch number
        self._writes: dict[int, _Write] = {}  # what is being written behind, by its own number
        self._orders = 0

    def __contains__(self, number: int) -> bool:
        return number in self._open

    @property
    def writing(self) -> bool:
        """Whether any instance is still writing to its SSD."""
        return bool(self._writes)

    def begin(self, number: int, request: Request, dispatch: Dispatch) -> Reservation:
        """Hold the blocks of a request where it was sent; none where it is inlined, whose KVCache no pool has."""
        if dispatch.inlined:
            self._open[number] = Reservation(dispatch.prefill, (), (), None)
            return self._open[number]
        blocks = self._pool.reserve(dispatch.prefill, request.block_keys)
        promoting = self._pool.promote(dispatch.prefill, blocks)
        reservation = Reservation(dispatch.prefill, blocks, promoting, None)
        reservation.replication = self._replicate(reservation, dispatch)
        self._open[number] = reservation
        return reservation

    def _replicate(self, reservation: Reservation, dispatch: Dispatch) -> Replication | None:
        """Hot-spot migration: copy those blocks that the best match has in DRAM and that nobody is writing at the
        chosen instance yet.
        """
        pool, source = self._pool, dispatch.replicate_from
        if source is None:
            return None
        blocks = reservation.blocks[: dispatch.replicate_blocks]
        hot = blocks[: pool.in_dram(source, [block.key for block in blocks])]
        promoting = set(reservation.promoting)
        wanted = tuple(b for b in hot if pool.awaits_writer(reservation.node, b) and b not in promoting)
        if not wanted:
            return None
        return Replication(source, pool.reserve(source, [block.key for block in wanted]), wanted)

    def prefilling(self, number: int) -> bool:
        reservation = self._open.get(number)
        return reservation is not None and reservation.prefilling

    def prefill_ended(self, message: PrefillDone | PrefillFailed) -> list[Send]:
        """Of one that is prefilling. What landed is found from now on, and written behind."""
        reservation, writes = self._open[message.dispatch], []
        reservation.prefilling = False
        if isinstance(message, PrefillDone):
            self._pool.lose(message.node, message.lost)
            self._pool.land(message.node, message.stored)
            writes = self._write(message.node, self._pool.write_behind(message.node, reservation.blocks))
        self._settle(message.dispatch)
        return writes

    def replicated(self, message: BlocksReplicated) -> bool:
        """Replicas are found from now on; the source's blocks are free to leave. False if nobody waited for them."""
        reservation = self._open.get(message.dispatch)
        if reservation is None or reservation.replication is None:
            return False
        self._pool.land(message.node, message.blocks)
        self._release_source(reservation)
        self._settle(message.dispatch)
        return True

    def promoted(self, message: BlocksPromoted) -> list[Send]:
        reservation = self._open.get(message.dispatch)
        if reservation is None or not reservation.promoting:
            return []
        write = self._pool.promoted(message.node, reservation.promoting, message.blocks)
        reservation.promoting = ()
        self._settle(message.dispatch)
        return self._write(message.node, write)

    def written(self, message: BlocksWritten) -> list[Send]:
        write = self._writes.pop(message.number, None)
        if write is None:
            return []
        return self._write(write.node, self._pool.written(write.node, write.blocks, message.keys))

    def _write(self, node: str, write: WriteBehind) -> list[Send]:
        if not write.blocks and not write.dropped:
            return []
        self._orders += 1
        if write.blocks:
            self._writes[self._orders] = _Write(node, write.blocks)
        return [Send(node, StoreOnSSD(self._orders, write.blocks, write.parents, write.dropped))]

    def copied_from(self, node: str) -> list[int]:
        """Dispatches for which blocks are being copied from this node."""
        moving = ((number, reservation.replication) for number, reservation in self._open.items())
        return [number for number, replication in moving if replication is not None and replication.source == node]

    def node_lost(self, node: str) -> list[int]:
        """The pool has forgotten the node. Returns the dispatches that were prefilling there."""
        self._writes = {number: write for number, write in self._writes.items() if write.node != node}
        there = [number for number, reservation in self._open.items() if reservation.node == node]
        prefilling = [number for number in there if self._open[number].prefilling]
        for number in there:
            reservation = self._open[number]
            reservation.prefilling, reservation.promoting = False, ()
            if reservation.replication is not None:
                self._release_source(reservation)
            self._settle(number)
        return prefilling

    def _release_source(self, reservation: Reservation) -> None:
        self._pool.release(reservation.replication.source, reservation.replication.source_blocks)
        reservation.replication = None

    def _settle(self, number: int) -> None:
        if self._open[number].settled:
            reservation = self._open.pop(number)
            self._pool.release(reservation.node, reservation.blocks)

    def check(self) -> None:
        """Assert the invariants."""
        assert not any(reservation.settled for reservation in self._open.values()), "what is settled is still held"
        if not self._open and not self._writes:
            assert self._pool.pins() == 0, "pins are held for nobody"
