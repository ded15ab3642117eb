"""One-sided reads: memory that ranks lend one another, read without its owner's help (report 3; FAST25 3.2).

The memory is an MPI window's, whose part of each rank the others can read while its owner computes, where MPI can: that
differs by MPI, by kind of window and by the way between two ranks, so it is measured when the window is made. What does
not work has to be asked for as a message. Reads move pieces in turns, so that messages are seen between them.

What lies at an offset the owner says; a reader may see it half rewritten, and must be able to tell. Knows nothing of
blocks. All but works() and check() runs on the messenger's thread.
"""

import os
import platform
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from mpi4py import MPI

from mooncake_jax.cache.ending import Ending, PeerLost

PIECE_BYTES = 1 << 20  # messages wait for one at most
AT_ONCE = 4  # pieces of one read in MPI's hands
PAGE = 4096
# While its owner stays out of MPI for so long, a part is to be read in half that time.
PAUSE_S = 0.1
SHARED_MEMORY = "/dev/shm"  # where MPIs keep windows that ranks of one machine share


@dataclass(frozen=True)
class LentMemory:
    """memory: what this rank lends, all zero, whether it can be read or not. note: what was measured, in one line.
    readable: bytes by rank, 0 where reads do not work.
    """

    memory: np.ndarray
    note: str
    readable: tuple[int, ...] = ()
    window: MPI.Win | None = None

    def works(self, rank: int) -> bool:
        return rank < len(self.readable) and self.readable[rank] > 0


class Lending:
    """Makes the window once all ranks have come. nbytes: of this rank's part; limited: whether its link is modelled,
    which reads would pass by.
    """

    def __init__(self, comm: MPI.Comm, nbytes: int, limited: bool, ending: Ending):
        self._comm, self._nbytes, self._limited, self._ending = comm, nbytes, limited, ending
        self._meeting: MPI.Request | None = None

    def poll(self) -> LentMemory | None:
        """The memory, once it is there; by then the future has ended with it too. Blocks while the window is made, to
        the deadline at most.
        """
        try:
            if self._meeting is None:
                self._meeting = self._comm.Ibarrier()
            if self._meeting.Test():
                lent = self._make()
            elif self._ending.overdue(time.monotonic()):
                lent = self._alone("not all ranks came in time")
            else:
                return None
        except MPI.Exception as error:
            lent = self._alone(_one_line(error))
        self._ending.end(result=lent)
        return lent

    def _make(self) -> LentMemory:
        """On a thread of its own, which is left behind if the others do not answer any more."""
        made: list[LentMemory] = []
        thread = threading.Thread(target=lambda: made.append(self._together()), name="lending", daemon=True)
        thread.start()
        thread.join(max(self._ending.deadline - time.monotonic(), 0.0))
        return made[0] if made else self._alone("making the window took too long")

    def _together(self) -> LentMemory:
        try:
            shares = self._comm.allgather((platform.node(), self._nbytes, self._limited, _free_bytes()))
            reason = _why_not(shares)
            return self._alone(reason) if reason is not None else self._window([share[1] for share in shares])
        except (MPI.Exception, MemoryError) as error:
            return self._alone(_one_line(error))

    def _window(self, sizes: list[int]) -> LentMemory:
        info = MPI.Info.Create({"alloc_shared_noncontig": "true"})  # parts begin at pages
        window = MPI.Win.Allocate(-(-self._nbytes // PAGE) * PAGE, 1, info, self._comm)
        window.Set_errhandler(MPI.ERRORS_RETURN)
        memory = np.frombuffer(window.tomemory(), np.uint8)[: self._nbytes]
        memory[:PAGE] = 0
        window.Lock_all(MPI.MODE_NOCHECK)
        seconds = {rank: _time_to_read(self._comm, window, memory, rank) for rank, size in enumerate(sizes) if size}
        works = {rank for rank, taken in seconds.items() if taken is not None and taken < PAUSE_S / 2}
        readable = tuple(size if rank in works else 0 for rank, size in enumerate(sizes))
        return LentMemory(memory, _note(seconds, works), readable, window)

    def _alone(self, reason: str) -> LentMemory:
        return LentMemory(np.zeros(self._nbytes, np.uint8), f"memory is read two-sided: {reason}")


def _why_not(shares: list[tuple[str, int, bool, int | None]]) -> str | None:
    """Why there can be no window of these shares, the same on all ranks."""
    if not any(nbytes for _, nbytes, _, _ in shares):
        return "no rank lends any"
    if any(limited for _, _, limited, _ in shares):
        return "the link is modelled"
    for host in {host for host, *_ in shares}:
        wanted = sum(nbytes for other, nbytes, *_ in shares if other == host)
        free = min((free for other, *_, free in shares if other == host and free is not None), default=None)
        if free is not None and wanted > free:  # touching what is not there would kill the rank
            return f"{host} has {free >> 20} MiB left in {SHARED_MEMORY} for {wanted >> 20}"
    return None


def _free_bytes() -> int | None:
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def _time_to_read(comm: MPI.Comm, window: MPI.Win, memory: np.ndarray, owner: int) -> float | None:
    """Seconds that reading a byte takes while its owner is out of MPI; None if it was wrong, and at the owner."""
    mark, seen = owner % 255 + 1, np.zeros(1, np.uint8)
    if comm.rank == owner:
        memory[0] = mark
    comm.Barrier()
    if comm.rank != owner:
        window.Rget([seen, MPI.BYTE], owner, 0).Wait()  # the way is found here
    comm.Barrier()
    if comm.rank == owner:
        time.sleep(PAUSE_S)
        taken = None
    else:
        time.sleep(PAUSE_S / 4)  # until the owner has surely left the barrier
        seen[0], begun = 0, time.monotonic()
        window.Rget([seen, MPI.BYTE], owner, 0).Wait()
        taken = time.monotonic() - begun if seen[0] == mark else None
    comm.Barrier()
    if comm.rank == owner:
        memory[0] = 0
    return taken


def _note(seconds: dict[int, float | None], works: set[int]) -> str:
    told = [
        f"rank {rank} in {1e3 * taken:.2g} ms" if rank in works else f"rank {rank} two-sided"
        for rank, taken in seconds.items()
        if taken is not None
    ]
    return f"read while its owner computes: {', '.join(told)}" if told else "lends memory and reads none"


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@dataclass(eq=False, slots=True)
class Read:
    """Of so many bytes as out has."""

    rank: int
    offset: int
    out: np.ndarray
    ending: Ending
    at: int = field(default=0, init=False)  # bytes that MPI has been asked for
    requests: deque[MPI.Request] = field(default_factory=deque, init=False)


class Reads:
    """lose: told of a rank that MPI says is dead, as in sending.py."""

    def __init__(self, lose: Callable[[int], None]):
        self.lent: LentMemory | None = None
        self._lose = lose
        self._reads: deque[Read] = deque()  # in the order of their turns
        self._abandoned: list[Read] = []  # MPI may still write where they read to

    @property
    def idle(self) -> bool:
        return not self._reads and not self._abandoned

    def check(self, read: Read) -> None:
        """Raises ValueError unless it reads what works."""
        if self.lent is None or not self.lent.works(read.rank):
            raise ValueError(f"rank {read.rank} lends no memory that can be read one-sided")
        end, size = read.offset + read.out.nbytes, self.lent.readable[read.rank]
        if read.offset < 0 or end > size:
            raise ValueError(f"rank {read.rank} lends {size} bytes, not {read.offset} to {end}")

    def begin(self, read: Read) -> None:
        self._reads.append(read)

    def poll(self) -> int:
        """Move the read whose turn it is on by a piece; returns whether it moved."""
        self._abandoned = [read for read in self._abandoned if not _complete(read)]
        if not self._reads:
            return 0
        read = self._reads[0]
        self._reads.rotate(-1)
        try:
            moved = self._advance(read)
        except MPI.Exception:
            self._lose(read.rank)
            return 1
        if read.at == read.out.nbytes and not read.requests:
            self._reads.remove(read)
            read.ending.end()
        return moved

    def _advance(self, read: Read) -> int:
        asked = read.at < read.out.nbytes and len(read.requests) < AT_ONCE
        if asked:
            piece = read.out[read.at : read.at + PIECE_BYTES]
            read.requests.append(self.lent.window.Rget([piece, MPI.BYTE], read.rank, read.offset + read.at))
            read.at += piece.nbytes
        under_way = len(read.requests)
        while read.requests and read.requests[0].Test():
            read.requests.popleft()
        return int(asked or len(read.requests) < under_way)

    def give_up(self, read: Read, error: Exception | None = None) -> None:
        """End it with this error, or as cancelled."""
        if read.ending.ended:
            return
        self._reads.remove(read)
        self._abandoned.append(read)
        read.ending.end(error)

    def give_up_overdue(self, now: float) -> None:
        for read in [read for read in self._reads if read.ending.overdue(now)]:
            self.give_up(read, read.ending.timeout())

    def lose(self, rank: int) -> None:
        for read in [read for read in self._reads if read.rank == rank]:
            self.give_up(read, PeerLost(rank))


def _complete(read: Read) -> bool:
    try:
        while read.requests and read.requests[0].Test():
            read.requests.popleft()
    except MPI.Exception:
        read.requests.clear()
    return not read.requests
