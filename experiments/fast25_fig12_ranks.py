"""The two ranks of fast25_fig12.py --real: rank 0 sends, rank 1 receives. Rank 0 prints seconds by size as JSON.

Arguments: "messenger", or "socket" for a plain TCP connection of the loopback; how many turns, of which the median
counts; sizes in bytes. Blocks are of one size, and lie ready on both sides. A transfer is over once rank 1 has said so.
"""

import json
import socket
import statistics
import sys
import threading
import time
import traceback

import numpy as np
from mpi4py import MPI

from mooncake_jax.cache.messenger import Messenger

BLOCK = 4 << 20  # bytes
DEADLINE_S = 60.0
LANDED = b"!"


class Inbox:
    """Lets buffers land in memory that is there already. landed: transfers that have; told: of ours, as rank 1 says."""

    def __init__(self, memory: np.ndarray):
        self._memory = memory
        self._changed = threading.Condition()
        self.landed = self.told = 0

    def on_message(self, source, message) -> None:
        with self._changed:
            self.told += 1
            self._changed.notify()

    def place(self, source, header):
        return blocks(self._memory[:header])

    def on_buffers(self, source, header, buffers) -> None:
        with self._changed:
            self.landed += 1
            self._changed.notify()

    def on_broken(self, source, header, reason) -> None: ...

    def on_lost(self, rank: int) -> None: ...

    def wait(self, count: str, least: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: getattr(self, count) >= least, DEADLINE_S):
                raise TimeoutError(f"{count} is {getattr(self, count)} after {DEADLINE_S:g} s, not {least}")


class OverMessenger:
    def __init__(self, comm: MPI.Comm, memory: np.ndarray):
        self._inbox, self._memory, self._transfers = Inbox(memory), memory, 0
        self._messenger = Messenger(comm, self._inbox)
        self._messenger.start()

    def send(self, nbytes: int) -> None:
        self._transfers += 1
        self._messenger.send_buffers(1, nbytes, blocks(self._memory[:nbytes]))
        self._inbox.wait("told", self._transfers)

    def receive(self, nbytes: int) -> None:
        self._transfers += 1
        self._inbox.wait("landed", self._transfers)
        self._messenger.send(0, "landed").result(DEADLINE_S)

    def close(self) -> None:
        self._messenger.close()


class OverSocket:
    """Rank 1 listens at a port of its own."""

    def __init__(self, comm: MPI.Comm, memory: np.ndarray):
        self._memory = memory
        if comm.rank == 1:
            with socket.create_server(("127.0.0.1", 0)) as server:
                comm.send(server.getsockname()[1], 0)
                self._socket = server.accept()[0]
        else:
            self._socket = socket.create_connection(("127.0.0.1", comm.recv(source=1)), DEADLINE_S)
        self._socket.settimeout(DEADLINE_S)

    def send(self, nbytes: int) -> None:
        for block in blocks(self._memory[:nbytes]):
            self._socket.sendall(block)
        if self._socket.recv(1) != LANDED:
            raise ConnectionError("rank 1 has closed the connection")

    def receive(self, nbytes: int) -> None:
        for block in blocks(self._memory[:nbytes]):
            view = memoryview(block)
            while view:
                count = self._socket.recv_into(view)
                if not count:
                    raise ConnectionError("rank 0 has closed the connection")
                view = view[count:]
        self._socket.sendall(LANDED)

    def close(self) -> None:
        self._socket.close()


WAYS = {"messenger": OverMessenger, "socket": OverSocket}


def blocks(memory: np.ndarray) -> list[np.ndarray]:
    return [memory[start : start + BLOCK] for start in range(0, len(memory), BLOCK)]


def main(way: str, turns: str, *sizes: str) -> None:
    comm, nbytes = MPI.COMM_WORLD, [int(size) for size in sizes]
    link = WAYS[way](comm, np.ones(max(nbytes), np.uint8))
    found = {}
    for size in nbytes:
        seconds = [timed(link.send if comm.rank == 0 else link.receive, size) for _ in range(int(turns) + 1)]
        found[size] = statistics.median(seconds[1:])  # the first warms up
    link.close()
    if comm.rank == 0:
        print(json.dumps(found), flush=True)


def timed(move, nbytes: int) -> float:
    begun = time.monotonic()
    move(nbytes)
    return time.monotonic() - begun


try:
    main(*sys.argv[1:])
except BaseException:
    traceback.print_exc()
    MPI.COMM_WORLD.Abort(1)  # the other rank would wait for this one
