"""Messenger: moves control messages and raw block buffers between ranks over MPI, asynchronously (report 3).

One thread per rank makes all MPI calls. Control messages are pickled and small; buffers are never pickled: a control
message, the *header*, announces them, the receiver says where they shall lie, and MPI writes them there. The messenger
knows the meaning of neither. The two sides are told in sending.py and receiving.py, memory that others read without
being asked in one_sided.py.

Between two ranks, messages arrive in the order they were sent, headers among them; a header's buffers may land later
than messages sent after it. Messages go ahead of all buffers, so no scheduler waits behind seconds of KVCache, and
transfers to one rank take turns.

Every transfer ends once: it has left, its owner has cancelled it, its deadline has come (TimeoutError) or the other
rank is dead (PeerLost). Receives are posted in advance, one a peer, so a peer's death shows as an error of that receive
(Open MPI with ULFM) and is reported once.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from mooncake_jax.cache.ending import Ending, PeerLost
from mooncake_jax.cache.link import Link
from mooncake_jax.cache.mailbox import Mailbox
from mooncake_jax.cache.one_sided import Lending, Read, Reads
from mooncake_jax.cache.pace import Pace
from mooncake_jax.cache.receiving import Receiver, Receiving
from mooncake_jax.cache.sending import Outgoing, Sending
from mooncake_jax.cache.wire import Buffer

DEADLINES_EVERY_S = 0.01  # deadlines are seen so late at most, a sleep aside


class Messenger:
    """Start with start(), end with close(). All that returns a future may be called from any thread."""

    def __init__(self, comm: MPI.Comm, receiver: Receiver):
        # Pieces of buffers, and windows, have communicators of their own.
        self._comm, pieces, self._lending_comm = (comm.Dup() for _ in range(3))
        for duplicate in (self._comm, pieces, self._lending_comm):
            duplicate.Set_errhandler(MPI.ERRORS_RETURN)
        self._receiver = receiver
        self._link: Link | None = None
        self._sending = Sending(self._comm, pieces, self._lose)
        self._receiving = Receiving(self._comm, pieces, receiver, self._lose)
        self._lending: Lending | None = None
        self._reads = Reads(self._lose)
        self._orders = Mailbox()  # calls for the messenger's thread
        self._close_by: float | None = None
        self._look_at_deadlines = 0.0
        self._spoken = 0  # messages sent and received, when it last looked
        self._lost: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="messenger", daemon=True)
        self.failure: BaseException | None = None

    @property
    def ranks(self) -> int:
        return self._comm.Get_size()

    @property
    def bytes_sent(self) -> int:
        """Of messages and buffers, as handed to MPI until now."""
        return self._sending.bytes_sent

    def start(self) -> None:
        self._thread.start()

    def limit(self, gbps: float) -> None:
        """From now on what this rank sends to others passes at most at this rate (10^9 bits a second, above 0). Call it
        once at most, before anything is sent or lent.
        """
        self._link = Link(gbps)
        self._orders.put(partial(self._sending.limit, self._link))

    def send(self, rank: int, message: Any) -> Future:
        """Send a small picklable message. The future ends when it has left, with PeerLost if it never will. A message
        cannot be taken back: cancelling has no effect.
        """
        return self._begin(self._sending.outgoing(rank, message, (), Ending(cancellable=False)), self._sending.begin)

    def send_buffers(
        self, rank: int, header: Any, buffers: Sequence[Buffer], deadline_s: float | None = None
    ) -> Future:
        """Announce and send contiguous arrays. They must not change until the future ends; no copy is made. It ends
        with PeerLost, or with TimeoutError once the deadline has come; cancel() ends it at once. The receiver hears of
        it, unless all was on its way.
        """
        outgoing = self._sending.outgoing(rank, header, buffers, Ending(deadline_s))
        outgoing.ending.on_cancel(lambda: self._orders.put(partial(self._sending.give_up, outgoing)))
        return self._begin(outgoing, self._sending.begin)

    def lend(self, nbytes: int, deadline_s: float) -> Future:
        """Lend memory to be read by the others; each rank calls this once, with 0 if it only reads. The future ends
        with LentMemory, soon after the deadline at the latest: there is always that much memory, and where it cannot be
        read from afar, works() says so.
        """
        ending = Ending(deadline_s, cancellable=False)
        self._orders.put(lambda: self._begin_lending(nbytes, ending))
        return ending.future

    def read(self, rank: int, offset: int, out: np.ndarray, deadline_s: float | None = None) -> Future:
        """Read what a rank that works() has lent, from this byte on, into contiguous memory, without its help. Ends as
        send_buffers() does. Raises ValueError for what is not there.
        """
        read = Read(rank, offset, out.reshape(-1).view(np.uint8), Ending(deadline_s))
        self._reads.check(read)
        read.ending.on_cancel(lambda: self._orders.put(partial(self._reads.give_up, read)))
        return self._begin(read, self._reads.begin)

    def close(self, deadline_s: float = 2.0) -> bool:
        """Send what is queued, then stop receiving. False if the deadline came first, or buffers are still on their way
        to this rank: MPI must not be finalised.
        """
        self._close_by = time.monotonic() + deadline_s
        self._orders.put(lambda: None)
        self._thread.join(deadline_s + 1.0)
        return not self._thread.is_alive() and self._sending.idle and self._receiving.idle and self._reads.idle

    def _begin(self, transfer: Outgoing | Read, begin: Callable[[Any], None]) -> Future:
        self._orders.put(partial(self._begin_unless_lost, transfer, begin))
        return transfer.ending.future

    # All below runs on the messenger's thread.

    def _run(self) -> None:
        try:
            pace = Pace()
            while not self._closed():
                moved = self._take_orders() + self._sending.post()
                moved += self._sending.poll() + self._receiving.poll() + self._reads.poll() + self._poll_lending()
                self._give_up_overdue()
                self._rest(pace.rest_s(moved > 0, self._more_comes_soon(moved)))
            self._receiving.close()
        except (
            BaseException
        ) as error:  # told to the rank's main loop, which ends the rank: nobody would wait for a dead thread
            self.failure = error
            self._receiver.on_lost(self._comm.Get_rank())

    def _more_comes_soon(self, moved: int) -> bool:
        """After a message, an answer. After a piece the next one, but not over a slow link, where looking for it all
        along would take most of a core.
        """
        spoken, self._spoken = self._spoken, self._sending.messages_sent + self._receiving.messages_received
        return spoken < self._spoken or (moved > 0 and self._link is None)

    def _closed(self) -> bool:
        if self._close_by is None:
            return False
        return (self._orders.empty and self._sending.idle and self._reads.idle) or time.monotonic() > self._close_by

    def _rest(self, seconds: float) -> None:
        """Until then, or the next order, or until the link lets something go."""
        due = self._sending.due()
        if due is not None:
            seconds = min(seconds, due - time.monotonic())
        if seconds <= 0:
            return
        if (order := self._orders.get(seconds)) is not None:
            order()

    def _take_orders(self) -> int:
        taken = 0
        while (order := self._orders.get()) is not None:
            order()
            taken += 1
        return taken

    def _begin_unless_lost(self, transfer: Outgoing | Read, begin: Callable[[Any], None]) -> None:
        if transfer.rank in self._lost:
            transfer.ending.end(PeerLost(transfer.rank))
        elif transfer.ending.cancelled:
            transfer.ending.end()
        else:
            begin(transfer)

    def _give_up_overdue(self) -> None:
        now = time.monotonic()
        if now >= self._look_at_deadlines:
            self._look_at_deadlines = now + DEADLINES_EVERY_S
            self._sending.give_up_overdue(now)
            self._reads.give_up_overdue(now)

    def _begin_lending(self, nbytes: int, ending: Ending) -> None:
        self._lending = Lending(self._lending_comm, nbytes, self._link is not None, ending)

    def _poll_lending(self) -> int:
        """All else of this rank waits while the ranks make their windows, and time one another."""
        if self._lending is None or (lent := self._lending.poll()) is None:
            return 0
        self._reads.lent, self._lending = lent, None
        return 1

    def _lose(self, rank: int) -> None:
        if rank in self._lost:
            return
        self._lost.add(rank)
        for side in (self._sending, self._receiving, self._reads):
            side.lose(rank)
        self._receiver.on_lost(rank)
