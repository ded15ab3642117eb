"""The sending side of the messenger: messages and buffers on their way into MPI's hands and out of them.

All of it runs on the messenger's thread. What leaves next says departures.py; what it looks like on the wire, wire.py.

A transfer that ends early, by its deadline, by its owner or because MPI fails, sends no more pieces, and its receiver
is told how many came. Pieces that MPI has already are sent all the same: it cannot be asked to let go, so they are kept
until it does, and their bytes are of no use to anybody then.
"""

import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpi4py import MPI

from mooncake_jax.cache.departures import Departures, Line
from mooncake_jax.cache.ending import Ending, PeerLost
from mooncake_jax.cache.link import Link
from mooncake_jax.cache.wire import Buffer, BuffersFollow, GivenUp, even_piece, message_parts, pieces

PIECE_BYTES = 5 << 19  # so large that handling it is little work beside copying it, 0.2 ms at memory speed
AT_ONCE = 2  # pieces in MPI's hands to one rank: its receiver always has one to copy; a message may wait behind both


@dataclass(eq=False, slots=True)
class Outgoing:
    """A message, or the header of buffers and those, as MPI will get it."""

    rank: int
    message: list[tuple[int, list]]
    pieces: list[list]  # of the buffers
    tag: int  # of those
    keep: Sequence[Buffer]  # what MPI reads while it has pieces
    ending: Ending
    line: Line | None = field(default=None, init=False)
    left: int = field(default=0, init=False)  # parts that MPI has not let go, not counting a header's


@dataclass(frozen=True, slots=True)
class _Part:
    """What MPI is given at once. Of a header there is no outgoing: its buffers end later."""

    outgoing: Outgoing | None
    rank: int
    comm: MPI.Comm
    tag: int
    data: list


class Sending:
    """messages, pieces: the communicators of either. lose: told of a rank that MPI says is dead; it calls lose() of all
    that must know, this one's too.
    """

    def __init__(self, messages: MPI.Comm, pieces: MPI.Comm, lose: Callable[[int], None]):
        self._messages, self._pieces, self._lose = messages, pieces, lose
        self._departures = Departures(AT_ONCE)
        self._piece = PIECE_BYTES
        self._tags, self._tags_in_all = itertools.count(), pieces.Get_attr(MPI.TAG_UB) + 1
        self._unfinished: dict[Outgoing, None] = {}
        # By (rank, whether pieces), in the order that MPI got them. They end in this order, so that only the first ones
        # need be looked at.
        self._posted: defaultdict[tuple[int, bool], deque[tuple[MPI.Request, _Part]]] = defaultdict(deque)
        self._abandoned: list = []  # with lost ranks: MPI may still touch their memory
        self.bytes_sent = 0  # of messages and buffers, as handed to MPI until now
        self.messages_sent = 0  # or parts of long ones

    def limit(self, link: Link) -> None:
        self._departures.limit(link)
        self._piece = min(PIECE_BYTES, link.piece)

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way or waits for it."""
        return not self._unfinished and not any(self._posted.values())

    def outgoing(self, rank: int, message: Any, buffers: Sequence[Buffer], ending: Ending) -> Outgoing:
        """To begin() with. May be called from any thread; raises what pickling the message does."""
        if not buffers:
            return Outgoing(rank, message_parts(message, None, self._piece), [], 0, (), ending)
        tag, sizes = next(self._tags) % self._tags_in_all, tuple(buffer.nbytes for buffer in buffers)
        piece = even_piece(sizes, self._piece)
        header = message_parts(message, BuffersFollow(tag, piece, sizes), self._piece)
        cut = [part for buffer in buffers for part in pieces(buffer, piece)]
        return Outgoing(rank, header, cut, tag, buffers, ending)

    def begin(self, outgoing: Outgoing) -> None:
        self._unfinished[outgoing] = None
        if not outgoing.pieces:
            outgoing.left = len(outgoing.message)
            self._put_message(outgoing.rank, outgoing.message, outgoing)
            return
        outgoing.left = len(outgoing.pieces)
        self._put_message(outgoing.rank, outgoing.message, None)
        parts = (_Part(outgoing, outgoing.rank, self._pieces, outgoing.tag, data) for data in outgoing.pieces)
        outgoing.line = Line(outgoing.rank, deque((len(part.data[0]), part) for part in parts))
        self._departures.put(time.monotonic(), outgoing.line)

    def _put_message(self, rank: int, parts: list[tuple[int, list]], outgoing: Outgoing | None) -> None:
        now = time.monotonic()
        for tag, data in parts:
            part = _Part(outgoing, rank, self._messages, tag, data)
            self._departures.put_message(now, rank, len(data[0]), part)

    def give_up(self, outgoing: Outgoing, error: Exception | None = None) -> None:
        """End a transfer with this error, or as cancelled, and tell its receiver unless it gets all of it anyway."""
        if outgoing.ending.ended:
            return
        del self._unfinished[outgoing]
        reason = "cancelled" if error is None else str(error)
        if outgoing.line is not None and (unsent := self._departures.drop(outgoing.line)):
            notice = GivenUp(outgoing.tag, len(outgoing.pieces) - unsent, reason)
            self._put_message(outgoing.rank, message_parts(None, notice, self._piece), None)
        outgoing.ending.end(error)

    def give_up_overdue(self, now: float) -> None:
        for outgoing in [outgoing for outgoing in self._unfinished if outgoing.ending.overdue(now)]:
            self.give_up(outgoing, outgoing.ending.timeout())

    def due(self) -> float | None:
        return self._departures.due()

    def post(self) -> int:
        """Give MPI what may leave now; returns how many parts."""
        posted = 0
        while (part := self._departures.pop(time.monotonic())) is not None:
            posted += 1
            try:
                request = part.comm.Isend(part.data, part.rank, part.tag)
            except MPI.Exception:
                self._lose(part.rank)
            else:
                self._posted[part.rank, part.comm is self._pieces].append((request, part))
                self.bytes_sent += len(part.data[0])
                self.messages_sent += part.comm is self._messages
        return posted

    def poll(self) -> int:
        """Look at what MPI has; returns how many parts it has let go."""
        moved = 0
        for (rank, are_pieces), line in list(self._posted.items()):
            try:
                while line and line[0][0].Test():
                    self._let_go(line.popleft()[1], are_pieces)
                    moved += 1
            except MPI.Exception:
                self._lose(rank)
        return moved

    def _let_go(self, part: _Part, is_piece: bool) -> None:
        if is_piece:
            self._departures.landed(time.monotonic(), part.rank)
        outgoing = part.outgoing
        if outgoing is None:
            return
        outgoing.left -= 1
        if not outgoing.left and not outgoing.ending.ended:
            del self._unfinished[outgoing]
            outgoing.ending.end()

    def lose(self, rank: int) -> None:
        self._departures.lose(rank)
        for are_pieces in (False, True):
            self._abandoned.extend(self._posted.pop((rank, are_pieces), ()))
        for outgoing in [outgoing for outgoing in self._unfinished if outgoing.rank == rank]:
            del self._unfinished[outgoing]
            outgoing.ending.end(PeerLost(rank))
