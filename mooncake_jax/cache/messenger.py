"""Messenger: moves control messages and raw block buffers between ranks over MPI, asynchronously (report 3).

One thread per rank makes all MPI calls. Control messages are pickled and small; buffers are never pickled: a control
message, the *header*, announces them, the receiver says where they shall lie, and MPI writes them there. The
messenger knows the meaning of neither.

Between two ranks, messages arrive in the order they were sent. Receives are posted in advance, one a peer, so a
peer's death shows as an error of that receive (Open MPI with ULFM) and is reported once; what was under way to or
from it ends with PeerLost.
"""

import pickle
import queue
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

CONTROL_TAG, BODY_TAG, BUFFER_TAG = 1, 2, 3
INLINE_BYTES = 8192  # a longer pickle follows in a message of its own
_PREFIX = struct.Struct("<q")  # bytes of the pickle

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
class _Outgoing:
    rank: int
    message: Any
    buffers: Sequence[np.ndarray]
    done: Future
    requests: list[MPI.Request] = field(default_factory=list)
    keep: list = field(default_factory=list)  # MPI reads these until the requests complete


@dataclass(slots=True)
class _Incoming:
    source: int
    header: Any
    placed: Sequence[np.ndarray] | None
    requests: list[MPI.Request]
    keep: list


class _Peer:
    """The receiving side of one other rank: a posted control receive, or the long body that follows one."""

    def __init__(self, comm: MPI.Comm, rank: int):
        self._comm, self.rank = comm, rank
        self._inline = bytearray(_PREFIX.size + INLINE_BYTES)
        self._body: bytearray | None = None
        self._post()

    def _post(self) -> None:
        self._body = None
        self.request = self._comm.Irecv([self._inline, MPI.BYTE], self.rank, CONTROL_TAG)

    def poll(self) -> tuple[Any, list[int]] | None:
        """The next (message, bytes of each buffer announced), or None. Raises MPI.Exception once the peer is dead."""
        if not self.request.Test():
            return None
        (length,) = _PREFIX.unpack_from(self._inline)
        if length > INLINE_BYTES and self._body is None:
            self._body = bytearray(length)
            self.request = self._comm.Irecv([self._body, MPI.BYTE], self.rank, BODY_TAG)
            return None
        body = self._body if self._body is not None else memoryview(self._inline)[_PREFIX.size : _PREFIX.size + length]
        received = pickle.loads(body)
        self._post()
        return received

    def cancel(self) -> None:
        self.request.Cancel()
        self.request.Wait()


def _bytes_view(array: np.ndarray) -> list:
    """MPI has no bfloat16: everything travels as bytes."""
    return [array.reshape(-1).view(np.uint8), MPI.BYTE]


class Messenger:
    """Start with start(), end with close(). send() and send_buffers() may be called from any thread."""

    def __init__(self, comm: MPI.Comm, receiver: Receiver):
        self._comm = comm.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._receiver = receiver
        self._queue: queue.SimpleQueue[_Outgoing] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._close_by: float | None = None
        self._outgoing: list[_Outgoing] = []
        self._incoming: list[_Incoming] = []
        self._peers: dict[int, _Peer] = {}
        self._lost: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="messenger", daemon=True)
        self.failure: BaseException | None = None

    @property
    def ranks(self) -> int:
        return self._comm.Get_size()

    def start(self) -> None:
        self._thread.start()

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
        """Send what is queued, then stop receiving. False if the deadline came first: MPI must not be finalised."""
        self._close_by = time.monotonic() + deadline_s
        self._wake.set()
        self._thread.join(deadline_s + 1.0)
        return not self._thread.is_alive() and not self._outgoing

    # All below runs on the messenger's thread.

    def _run(self) -> None:
        try:
            for rank in range(self._comm.Get_size()):
                if rank != self._comm.Get_rank():
                    self._peers[rank] = _Peer(self._comm, rank)
            sleep = SHORTEST_SLEEP_S
            while not self._closed():
                moved = self._post_queued() + self._poll_outgoing() + self._poll_peers() + self._poll_incoming()
                sleep = SHORTEST_SLEEP_S if moved else min(sleep * 1.3, LONGEST_SLEEP_S)
                if self._wake.wait(sleep):
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
        return (self._queue.empty() and not self._outgoing) or time.monotonic() > self._close_by

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
                self._outgoing.append(outgoing)
        return posted

    def _post(self, outgoing: _Outgoing) -> None:
        sizes = [buffer.nbytes for buffer in outgoing.buffers]
        body = pickle.dumps((outgoing.message, sizes), pickle.HIGHEST_PROTOCOL)
        prefix = _PREFIX.pack(len(body))
        parts = [(CONTROL_TAG, [prefix + body, MPI.BYTE])]
        if len(body) > INLINE_BYTES:
            parts = [(CONTROL_TAG, [prefix, MPI.BYTE]), (BODY_TAG, [body, MPI.BYTE])]
        parts += [(BUFFER_TAG, _bytes_view(buffer)) for buffer in outgoing.buffers]
        for tag, part in parts:
            outgoing.keep.append(part)
            outgoing.requests.append(self._comm.Isend(part, outgoing.rank, tag))

    def _poll_outgoing(self) -> int:
        return self._poll_transfers(
            self._outgoing,
            lambda o: o.rank,
            lambda o: o.done.set_result(None),
            lambda o: o.done.set_exception(PeerLost(f"rank {o.rank} is lost")),
        )

    def _poll_incoming(self) -> int:
        return self._poll_transfers(
            self._incoming,
            lambda i: i.source,
            lambda i: self._receiver.on_buffers(i.source, i.header, i.placed) if i.placed is not None else None,
            lambda i: None,
        )

    def _poll_transfers(self, transfers: list, peer_of, on_done, on_lost) -> int:
        """Drop from the list, in place, what is complete or lost; returns how many were."""
        remaining = []
        for transfer in transfers:
            try:
                complete = MPI.Request.Testall(transfer.requests)
            except MPI.Exception:
                self._lose(peer_of(transfer))
                complete = False
            if complete:
                on_done(transfer)
            elif peer_of(transfer) in self._lost:
                on_lost(transfer)
            else:
                remaining.append(transfer)
        moved = len(transfers) - len(remaining)
        transfers[:] = remaining
        return moved

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

    def _dispatch(self, source: int, message: Any, sizes: list[int]) -> None:
        if not sizes:
            self._receiver.on_message(source, message)
            return
        placed = self._receiver.place(source, message)
        if placed is not None and [a.nbytes for a in placed] != sizes:
            raise ValueError(f"{message} announces buffers of {sizes} bytes, placed in {[a.nbytes for a in placed]}")
        # Buffers nobody wants must still be received, or they would be taken for the next ones.
        targets = [_bytes_view(a) for a in placed or [np.empty(size, np.uint8) for size in sizes]]
        requests = [self._comm.Irecv(target, source, BUFFER_TAG) for target in targets]
        self._incoming.append(_Incoming(source, message, placed, requests, targets))

    def _lose(self, rank: int) -> None:
        if rank in self._lost:
            return
        self._lost.add(rank)
        self._peers.pop(rank, None)
        self._receiver.on_lost(rank)
