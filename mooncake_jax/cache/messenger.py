"""Messenger: moves control messages and raw block buffers between ranks over MPI, asynchronously (report 3).

One thread per rank makes all MPI calls. Control messages are pickled and small; buffers are never pickled: a control
message, the *header*, announces them, the receiver says where they shall lie, and MPI writes them there. The
messenger knows the meaning of neither. What is sent for a message is told in wire.py.

Between two ranks, messages arrive in the order they were sent, headers among them; a header's buffers may land later
than messages sent after it. Where the link has a modelled rate (link.py), all messages go ahead of all buffers, which
keeps this promise: no scheduler waits behind seconds of KVCache.

Receives are posted in advance, one a peer, so a peer's death shows as an error of that receive (Open MPI with ULFM)
and is reported once; what was under way to or from it ends with PeerLost.
"""

import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from mooncake_jax.cache.link import Link
from mooncake_jax.cache.wire import BUFFER_TAG, UNCUT, Peer, outgoing_parts, pieces

# The thread sleeps between polls: short while there is traffic, longer the longer there is none.
SHORTEST_SLEEP_S, LONGEST_SLEEP_S = 50e-6, 2e-3


class PeerLost(Exception):
    """The other rank of a transfer died."""


class Receiver(Protocol):
    """What the messenger calls, always from its own thread; none of these may block."""

    def on_message(self, source: int, message: Any) -> None: ...

    def place(self, source: int, header: Any) -> Sequence[np.ndarray] | None:
        """Contiguous arrays, one for each announced buffer and of its size; None to throw the buffers away."""

    def on_buffers(self, source: int, header: Any, buffers: Sequence[np.ndarray]) -> None:
        """All buffers of this header have landed where place() said."""

    def on_lost(self, rank: int) -> None: ...


@dataclass(slots=True)
class _Transfer:
    rank: int  # the other one
    requests: deque[MPI.Request] = field(default_factory=deque, kw_only=True)  # those not known to be complete
    keep: list = field(default_factory=list, kw_only=True)  # MPI reads or writes these until the requests complete
    waiting: int = field(default=0, kw_only=True)  # parts that the link has not let go yet

    def complete(self) -> bool:
        """Raises MPI.Exception once the other rank is dead."""
        while self.requests and self.requests[0].Test():
            self.requests.popleft()
        return not self.requests and not self.waiting


@dataclass(slots=True)
class _Outgoing(_Transfer):
    message: Any
    buffers: Sequence[np.ndarray]
    done: Future


@dataclass(slots=True)
class _Incoming(_Transfer):
    header: Any
    placed: Sequence[np.ndarray] | None


class Messenger:
    """Start with start(), end with close(). send() and send_buffers() may be called from any thread."""

    def __init__(self, comm: MPI.Comm, receiver: Receiver):
        self._comm = comm.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._receiver = receiver
        self._link: Link | None = None
        self._queue: queue.SimpleQueue[_Outgoing] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._close_by: float | None = None
        # By rank, in the order they were sent, messages apart from buffers. They end in this order, so that only the
        # first ones need be looked at, however many wait behind a slow link.
        self._outgoing: defaultdict[tuple[int, bool], deque[_Outgoing]] = defaultdict(deque)
        self._incoming: defaultdict[int, deque[_Incoming]] = defaultdict(deque)
        self._peers: dict[int, Peer] = {}
        self._lost: set[int] = set()
        self._abandoned: list[_Transfer] = []  # with lost ranks: MPI may still touch their memory
        self._thread = threading.Thread(target=self._run, name="messenger", daemon=True)
        self.failure: BaseException | None = None
        self.bytes_sent = 0  # of messages and buffers, as handed to MPI until now

    @property
    def ranks(self) -> int:
        return self._comm.Get_size()

    def start(self) -> None:
        self._thread.start()

    def limit(self, gbps: float) -> None:
        """From now on what this rank sends to others passes at most at this rate (10^9 bits a second, above 0). Call it
        once at most.
        """
        self._link = Link(gbps)

    def send(self, rank: int, message: Any) -> Future:
        """Send a small picklable message. The future ends when it has left, with PeerLost if it never will."""
        return self.send_buffers(rank, message, ())

    def send_buffers(self, rank: int, header: Any, buffers: Sequence[np.ndarray]) -> Future:
        """Announce and send contiguous arrays. They must not change until the future ends; no copy is made."""
        outgoing = _Outgoing(rank, header, buffers, Future())
        self._queue.put(outgoing)
        self._wake.set()
        return outgoing.done

    def close(self, deadline_s: float = 2.0) -> bool:
        """Send what is queued, then stop receiving. False if the deadline came first, or buffers are still on their way
        to this rank: MPI must not be finalised.
        """
        self._close_by = time.monotonic() + deadline_s
        self._wake.set()
        self._thread.join(deadline_s + 1.0)
        return not (self._thread.is_alive() or any(self._outgoing.values()) or any(self._incoming.values()))

    # All below runs on the messenger's thread.

    def _run(self) -> None:
        try:
            for rank in range(self._comm.Get_size()):
                if rank != self._comm.Get_rank():
                    self._peers[rank] = Peer(self._comm, rank)
            sleep = SHORTEST_SLEEP_S
            while not self._closed():
                moved = self._post_queued() + self._send_due()
                moved += self._poll_outgoing() + self._poll_peers() + self._poll_incoming()
                sleep = SHORTEST_SLEEP_S if moved else min(sleep * 1.3, LONGEST_SLEEP_S)
                if self._wake.wait(self._until_due(sleep)):
                    self._wake.clear()
            for peer in self._peers.values():
                peer.cancel()
        except (
            BaseException
        ) as error:  # told to the rank's main loop, which ends the rank: nobody would wait for a dead thread
            self.failure = error
            self._receiver.on_lost(self._comm.Get_rank())

    def _closed(self) -> bool:
        if self._close_by is None:
            return False
        return (self._queue.empty() and not any(self._outgoing.values())) or time.monotonic() > self._close_by

    def _post_queued(self) -> int:
        posted = 0
        while not self._queue.empty():
            outgoing = self._queue.get()
            posted += 1
            if outgoing.rank in self._lost:
                outgoing.done.set_exception(PeerLost(f"rank {outgoing.rank} is lost"))
                continue
            try:
                self._post(outgoing)
            except MPI.Exception:
                self._lose(outgoing.rank)
                outgoing.done.set_exception(PeerLost(f"rank {outgoing.rank} is lost"))
            else:
                self._outgoing[outgoing.rank, bool(outgoing.buffers)].append(outgoing)
        return posted

    def _post(self, outgoing: _Outgoing) -> None:
        link = self._link  # which limit() may set now
        parts = outgoing_parts(outgoing.message, outgoing.buffers, UNCUT if link is None else link.piece)
        if link is None:
            for tag, part in parts:
                self._send(outgoing, tag, part)
            return
        outgoing.waiting = len(parts)
        now = time.monotonic()
        for tag, part in parts:
            link.put(now, outgoing.rank, len(part[0]), (outgoing, tag, part), urgent=tag != BUFFER_TAG)

    def _send(self, outgoing: _Outgoing, tag: int, part: list) -> None:
        outgoing.keep.append(part)
        outgoing.requests.append(self._comm.Isend(part, outgoing.rank, tag))
        self.bytes_sent += len(part[0])

    def _send_due(self) -> int:
        """Send what the link lets go now; returns how many parts."""
        sent = 0
        while self._link is not None and (due := self._link.pop(time.monotonic())) is not None:
            outgoing, tag, part = due
            sent += 1
            try:
                self._send(outgoing, tag, part)
                outgoing.waiting -= 1
            except MPI.Exception:
                self._lose(outgoing.rank)
        return sent

    def _until_due(self, sleep: float) -> float:
        """How long to sleep, at most so long, if the link lets something go before."""
        due = self._link.due() if self._link is not None else None
        return sleep if due is None else min(sleep, max(due - time.monotonic(), 0.0))

    def _poll_outgoing(self) -> int:
        return self._poll_transfers(
            self._outgoing,
            lambda o: o.done.set_result(None),
            lambda o: o.done.set_exception(PeerLost(f"rank {o.rank} is lost")),
        )

    def _poll_incoming(self) -> int:
        return self._poll_transfers(
            self._incoming,
            lambda i: self._receiver.on_buffers(i.rank, i.header, i.placed) if i.placed is not None else None,
            lambda i: None,
        )

    def _poll_transfers(self, lines: dict[Any, deque], on_done: Callable, on_lost: Callable) -> int:
        """Drop from the front of each line what is complete or lost; returns how many were."""
        moved = 0
        for line in lines.values():
            while line and self._has_ended(line[0], on_done, on_lost):
                line.popleft()
                moved += 1
        return moved

    def _has_ended(self, transfer: _Transfer, on_done: Callable, on_lost: Callable) -> bool:
        try:
            complete = transfer.complete()
        except MPI.Exception:
            self._lose(transfer.rank)
            complete = False
        if complete:
            on_done(transfer)
        elif transfer.rank in self._lost:
            self._abandoned.append(transfer)
            on_lost(transfer)
        return complete or transfer.rank in self._lost

    def _poll_peers(self) -> int:
        moved = 0
        for peer in list(self._peers.values()):
            try:
                while (received := peer.poll()) is not None:
                    moved += 1
                    self._dispatch(peer.rank, *received)
            except MPI.Exception:
                self._lose(peer.rank)
        return moved

    def _dispatch(self, source: int, message: Any, sizes: list[int], piece: int) -> None:
        if not sizes:
            self._receiver.on_message(source, message)
            return
        placed = self._receiver.place(source, message)
        if placed is not None and [a.nbytes for a in placed] != sizes:
            raise ValueError(f"{message} announces buffers of {sizes} bytes, placed in {[a.nbytes for a in placed]}")
        # Buffers nobody wants must still be received, or they would be taken for the next ones.
        targets = [part for a in placed or [np.empty(size, np.uint8) for size in sizes] for part in pieces(a, piece)]
        requests = deque(self._comm.Irecv(target, source, BUFFER_TAG) for target in targets)
        self._incoming[source].append(_Incoming(source, message, placed, requests=requests, keep=targets))

    def _lose(self, rank: int) -> None:
        if rank in self._lost:
            return
        self._lost.add(rank)
        self._peers.pop(rank, None)
        if self._link is not None:
            self._link.drop(rank)
        self._receiver.on_lost(rank)
