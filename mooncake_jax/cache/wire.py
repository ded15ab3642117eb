"""What MPI sends for one message of the messenger, and how it is received again.

A prefix and a pickled body; a long body follows in sends of its own, and so does each buffer, in pieces where the
sender's link has a rate. Knows not when they may go.
"""

import pickle
import struct
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

CONTROL_TAG, BODY_TAG, BUFFER_TAG = 1, 2, 3
INLINE_BYTES = 8192  # a longer pickle follows in sends of its own
UNCUT = sys.maxsize
_PREFIX = struct.Struct("<qq")  # bytes of the pickle; at how many bytes it, if long, and the buffers are cut


def outgoing_parts(message: Any, buffers: Sequence[np.ndarray], piece: int) -> list[tuple[int, list]]:
    """(tag, what to give to MPI) in the order they are received in; long bodies and buffers cut after `piece` bytes."""
    body = pickle.dumps((message, [buffer.nbytes for buffer in buffers]), pickle.HIGHEST_PROTOCOL)
    prefix = _PREFIX.pack(len(body), piece)
    if len(body) > INLINE_BYTES:
        parts = [(CONTROL_TAG, [prefix, MPI.BYTE]), *((BODY_TAG, part) for part in pieces(body, piece))]
    else:
        parts = [(CONTROL_TAG, [prefix + body, MPI.BYTE])]
    for buffer in buffers:
        parts += [(BUFFER_TAG, part) for part in pieces(buffer, piece)]
    return parts


def pieces(data: bytes | bytearray | np.ndarray, piece: int) -> Iterable[list]:
    """What to give to MPI one by one; as bytes, for it has no bfloat16. Of nothing it is one empty piece."""
    view = data.reshape(-1).view(np.uint8) if isinstance(data, np.ndarray) else memoryview(data)
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

    def poll(self) -> tuple[Any, list[int], int] | None:
        """The next (message, bytes of each buffer announced, bytes of a piece), or None. Raises MPI.Exception once the
        peer is dead.
        """
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
        message, sizes = pickle.loads(body)
        self._post()
        return message, sizes, piece

    def cancel(self) -> None:
        for request in self._requests:
            request.Cancel()
            request.Wait()
