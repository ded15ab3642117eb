"""Run by test_cache_messenger.py on three ranks: each prints one line of what it saw."""

import os
import signal
import sys
import threading
import time

import numpy as np
from mpi4py import MPI

from mooncake_jax.cache.messenger import Messenger, PeerLost

DEADLINE_S = 30.0


class Inbox:
    def __init__(self):
        self.messages, self.landed, self.lost, self.arrays = [], [], [], {}
        self.changed = threading.Condition()

    def _note(self, where, what):
        with self.changed:
            where.append(what)
            self.changed.notify_all()

    def on_message(self, source, message):
        self._note(self.messages, (source, message))

    def place(self, source, header):
        if header == "unwanted":
            return None
        self.arrays[header] = [np.empty(shape, np.uint16) for shape in header[1]]
        return self.arrays[header]

    def on_buffers(self, source, header, buffers):
        assert buffers is self.arrays[header]
        self._note(self.landed, header)

    def on_lost(self, rank):
        self._note(self.lost, rank)

    def wait(self, condition):
        with self.changed:
            assert self.changed.wait_for(condition, DEADLINE_S), "deadline"


def order_and_sizes(messenger, inbox, rank):
    """Rank 0 sends to 1: small and long messages and buffers, which must arrive in order and whole."""
    shapes = ((3, 50_000), (7,))
    if rank == 0:
        rng = np.random.default_rng(1)
        for i in range(200):
            messenger.send(1, (i, "x" * (i * 300)))
        messenger.send_buffers(1, "unwanted", [np.zeros(1000, np.uint16)])
        sent = [
            messenger.send_buffers(1, (i, shapes), [rng.integers(0, 65536, s, np.uint16) for s in shapes])
            for i in range(20)
        ]
        for future in sent:
            future.result(DEADLINE_S)
        messenger.send(1, "end")
        print("rank 0 sent all")
    elif rank == 1:
        inbox.wait(lambda: (0, "end") in inbox.messages and len(inbox.landed) == 20)
        rng = np.random.default_rng(1)
        expected = [[rng.integers(0, 65536, s, np.uint16) for s in shapes] for _ in range(20)]
        in_order = [m for _, m in inbox.messages[:200]] == [(i, "x" * (i * 300)) for i in range(200)]
        equal = all(
            np.array_equal(a, b) for i in range(20) for a, b in zip(inbox.arrays[(i, shapes)], expected[i], strict=True)
        )
        print(f"rank 1 in order {in_order}, buffers equal {equal}")


def peer_death(messenger, inbox, rank):
    """Rank 2 dies; the others hear of it once, a send to it ends with PeerLost, and they still reach one another."""
    if rank == 2:
        inbox.wait(lambda: len(inbox.messages) == 2)
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    messenger.send(2, "die").result(DEADLINE_S)
    inbox.wait(lambda: inbox.lost)
    try:
        messenger.send(2, "too late").result(DEADLINE_S)
        outcome = "sent"
    except PeerLost as error:
        outcome = str(error)
    messenger.send(1 - rank, "still here")
    inbox.wait(lambda: (1 - rank, "still here") in inbox.messages)
    print(f"rank {rank} lost {inbox.lost}, then: {outcome}")


def main():
    comm = MPI.COMM_WORLD
    inbox = Inbox()
    messenger = Messenger(comm, inbox)
    messenger.start()
    {"order": order_and_sizes, "death": peer_death}[sys.argv[1]](messenger, inbox, comm.Get_rank())
    begun = time.monotonic()
    messenger.close()
    assert time.monotonic() - begun < 3, "close took too long"
    assert messenger.failure is None, messenger.failure


main()
