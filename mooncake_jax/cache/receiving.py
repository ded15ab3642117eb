"""The receiving side of the messenger: messages, and the pieces of buffers that messages announced.

All of it runs on the messenger's thread. Receives are posted for a few pieces of each transfer at a time. A transfer
that its sender gives up ends here with the last piece that it did send; what is posted beyond is taken back.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from mooncake_jax.cache.wire import BuffersFollow, GivenUp, Peer, pieces

POSTED = 2  # receives of one transfer: its sender has as many pieces under way


class Receiver(Protocol):
    """What the messenger calls, always from its own thread; none of these may block."""

    def on_message(self, source: int, message: Any) -> None: ...

    def place(self, source: int, header: Any) -> Sequence[np.ndarray] | None:
        """Contiguous arrays, one for each announced buffer and of its size; None to throw the buffers away."""

    def on_buffers(self, source: int, header: Any, buffers: Sequence[np.ndarray]) -> None:
        """All buffers of this header have landed where place() said."""

    def on_broken(self, source: int, header: Any, reason: str) -> None:
        """Not all of this header's buffers will come: where place() said lies anything. Called unless they were to be
        thrown away. If the source is lost, MPI may write there yet.
        """

    def on_lost(self, rank: int) -> None: ...


@dataclass(eq=False, slots=True)
class _Incoming:
    source: int
    header: Any
    tag: int
    placed: Sequence[np.ndarray] | None
    targets: deque[list]  # of the pieces that have not come
    pieces: int  # announced
    left: int  # that will come, or are being received
    under_way: deque[tuple[MPI.Request, list]] = field(default_factory=deque, init=False)  # in the order they come
    broken: str | None = field(default=None, init=False)  # why not all will come


class Receiving:
    """messages, pieces: the communicators of either. lose: told of a rank that MPI says is dead, as in sending.py."""

    def __init__(self, messages: MPI.Comm, pieces: MPI.Comm, receiver: Receiver, lose: Callable[[int], None]):
        self._pieces, self._receiver, self._lose = pieces, receiver, lose
        others = (rank for rank in range(messages.Get_size()) if rank != messages.Get_rank())
        self._peers = {rank: Peer(messages, rank) for rank in others}
        self._incoming: defaultdict[int, dict[int, _Incoming]] = defaultdict(dict)  # by source and tag
        self._abandoned: list = []  # from lost ranks: MPI may still touch their memory
        self.messages_received = 0

    @property
    def idle(self) -> bool:
        """Whether no buffers are on their way."""
        return not any(self._incoming.values())

    def close(self) -> None:
        for peer in self._peers.values():
            peer.cancel()

    def poll(self) -> int:
        """Look at what MPI has; returns how many messages and pieces have come or landed."""
        moved = 0
        for rank in list(self._peers):
            try:
                moved += self._poll_messages(rank)
                moved += sum(self._poll_pieces(incoming) for incoming in list(self._incoming[rank].values()))
            except MPI.Exception:
                self._lose(rank)
        return moved

    def _poll_messages(self, rank: int) -> int:
        moved = 0
        while (received := self._peers[rank].poll()) is not None:
            moved += 1
            self.messages_received += 1
            match received:
                case (header, BuffersFollow() as announced):
                    self._begin(rank, header, announced)
                case (_, GivenUp() as given_up):
                    self._give_up(rank, given_up)
                case (message, None):
                    self._receiver.on_message(rank, message)
        return moved

    def _begin(self, source: int, header: Any, announced: BuffersFollow) -> None:
        placed = self._receiver.place(source, header)
        if placed is not None and tuple(array.nbytes for array in placed) != announced.sizes:
            sizes = [array.nbytes for array in placed]
            raise ValueError(f"{header} announces buffers of {list(announced.sizes)} bytes, placed in {sizes}")
        # Buffers nobody wants must still be received, or their sender would wait for ever.
        arrays = placed if placed is not None else [np.empty(size, np.uint8) for size in announced.sizes]
        targets = deque(part for array in arrays for part in pieces(array, announced.piece))
        incoming = _Incoming(source, header, announced.tag, placed, targets, len(targets), len(targets))
        self._incoming[source][announced.tag] = incoming
        self._post(incoming)

    def _post(self, incoming: _Incoming) -> None:
        while incoming.targets and len(incoming.under_way) < POSTED:
            target = incoming.targets.popleft()
            incoming.under_way.append((self._pieces.Irecv(target, incoming.source, incoming.tag), target))

    def _poll_pieces(self, incoming: _Incoming) -> int:
        """At most one, so that messages are seen between them."""
        if not incoming.under_way[0][0].Test():
            return 0
        incoming.under_way.popleft()
        incoming.left -= 1
        self._post(incoming)
        self._end_if_complete(incoming)
        return 1

    def _give_up(self, source: int, given_up: GivenUp) -> None:
        incoming = self._incoming[source][given_up.tag]
        incoming.broken = given_up.reason
        incoming.left -= incoming.pieces - given_up.pieces
        while len(incoming.under_way) > incoming.left:
            request, _ = incoming.under_way.pop()
            request.Cancel()
            request.Wait()
        while len(incoming.under_way) + len(incoming.targets) > incoming.left:
            incoming.targets.pop()
        self._end_if_complete(incoming)

    def _end_if_complete(self, incoming: _Incoming) -> None:
        if incoming.left:
            return
        del self._incoming[incoming.source][incoming.tag]
        if incoming.placed is None:
            return
        if incoming.broken is None:
            self._receiver.on_buffers(incoming.source, incoming.header, incoming.placed)
        else:
            self._receiver.on_broken(incoming.source, incoming.header, incoming.broken)

    def lose(self, rank: int) -> None:
        self._peers.pop(rank, None)
        for incoming in self._incoming.pop(rank, {}).values():
            self._abandoned.append(incoming)
            if incoming.placed is not None:
                self._receiver.on_broken(rank, incoming.header, f"rank {rank} is lost")
