"""What MPI sends for one message of the messenger, and how it is received again.

A message is a prefix and a pickled body; a long body follows in sends of its own. Where buffers follow, the body says
under which tag, how long they are and how they are cut: their pieces go through a communicator of their own, where a
tag names a transfer. Knows not when anything may go.
"""

import pickle
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

CONTROL_TAG, BODY_TAG = 1, 2
INLINE_BYTES = 8192  # a longer pickle follows in sends of its own
_PREFIX = struct.Struct("<qq")  # bytes of the pickle; at how many bytes it is cut, if long


@dataclass(frozen=True, slots=True)
class DeviceBuffer:
    """Bytes in a device's memory, there as long as their owner is."""

    address: int
    nbytes: int
    owner: Any


Buffer = np.ndarray | DeviceBuffer  # an array must be contiguous


@dataclass(frozen=True, slots=True)
class BuffersFollow:
    """With a header: its buffers have so many bytes, and come in pieces of at most `piece` under this tag."""

    tag: int
    piece: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GivenUp:
    """No more than so many pieces come under this tag."""

    tag: int
    pieces: int
    reason: str


Notice = BuffersFollow | GivenUp | None


def message_parts(message: Any, notice: Notice, piece: int) -> list[tuple[int, list]]:
    """(tag, what to give to MPI) in the order they are received in; a long body is cut after `piece` bytes."""
    body = pickle.dumps((message, notice), pickle.HIGHEST_PROTOCOL)
    prefix = _PREFIX.pack(len(body), piece)
    if len(body) > INLINE_BYTES:
        return [(CONTROL_TAG, [prefix, MPI.BYTE]), *((BODY_TAG, part) for part in pieces(body, piece))]
    return [(CONTROL_TAG, [prefix + body, MPI.BYTE])]


def even_piece(sizes: Sequence[int], most: int) -> int:
    """Bytes of a piece, at most so many, that leave no small rest of the largest of these buffers."""
    largest = max(sizes)
    return max(-(-largest // max(-(-largest // most), 1)), 1)


def pieces(data: bytes | bytearray | Buffer, piece: int) -> Iterable[list]:
    """What to give to MPI one by one; as bytes, for it has no bfloat16. Of nothing it is one empty piece."""
    if isinstance(data, DeviceBuffer):
        view = MPI.buffer.fromaddress(data.address, data.nbytes, readonly=True)
    elif isinstance(data, np.ndarray):
        view = data.reshape(-1).view(np.uint8)
    else:
        view = memoryview(data)
    if len(view) <= piece:
        return ([view, MPI.BYTE],)
    return ([view[start : start + piece], MPI.BYTE] for start in range(0, len(view), piece))


class Peer:
    """The receiving side of one other rank: a posted control receive, or the long body that follows one."""

    def __init__(self, comm: MPI.Comm, rank: int):
        self._comm, self.rank = comm, rank
        self._inline = bytearray(_PREFIX.size + INLINE_BYTES)
        self._body: bytearray | None = None
        self._requests: deque[MPI.Request] = deque()
        self._post()

    def _post(self) -> None:
        self._body = None
        self._requests.append(self._comm.Irecv([self._inline, MPI.BYTE], self.rank, CONTROL_TAG))

    def poll(self) -> tuple[Any, Notice] | None:
        """The next message and what is noted with it, or None. Raises MPI.Exception once the peer is dead."""
        while self._requests:
            if not self._requests[0].Test():
                return None
            self._requests.popleft()
        length, piece = _PREFIX.unpack_from(self._inline)
        if length > INLINE_BYTES and self._body is None:
            self._body = bytearray(length)
            self._requests.extend(self._comm.Irecv(part, self.rank, BODY_TAG) for part in pieces(self._body, piece))
            return None
        body = self._body if self._body is not None else memoryview(self._inline)[_PREFIX.size : _PREFIX.size + length]
        received = pickle.loads(body)
        self._post()
        return received

    def cancel(self) -> None:
        for request in self._requests:
            request.Cancel()
            request.Wait()
