"""Run by test_cache_messenger.py on three ranks: each prints one line of what it saw.

Arguments: the case, and the link's rate in Gbps where it has one.
"""

import os
import signal
import sys
import threading
import time

import numpy as np
from mpi4py import MPI

from mooncake_jax.cache.messenger import Messenger, PeerLost

DEADLINE_S, LEAVE_S = 30.0, 5


class Inbox:
    def __init__(self):
        self.messages, self.placed, self.landed, self.lost, self.arrays = [], [], [], [], {}
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
        self._note(self.placed, header)
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


def at_the_rate(messenger, inbox, rank):
    """Rank 0 sends buffers to both others, and messages that need not wait behind them; each other answers the last."""
    shapes, count = ((1_000_000,), (5,)), 4
    if rank == 0:
        kv = [np.arange(1_000_000, dtype=np.uint16), np.arange(5, dtype=np.uint16)]
        begun = time.monotonic()
        sent = [messenger.send_buffers(to, (i, shapes), kv) for i in range(count) for to in (1, 2)]
        for to in (1, 2):
            messenger.send(to, "not behind them")
        for future in sent:
            future.result(DEADLINE_S)
        left = time.monotonic() - begun
        inbox.wait(lambda: len(inbox.messages) == 2)
        landed = time.monotonic() - begun
        print(f"rank 0 took {left} and {landed} s for {messenger.bytes_sent} bytes of {2 * count * 2_000_010}")
    else:
        inbox.wait(lambda: inbox.messages)
        landed_before = len(inbox.landed)
        inbox.wait(lambda: len(inbox.landed) == count)
        messenger.send(0, "landed").result(DEADLINE_S)
        equal = all(
            np.array_equal(array, np.arange(array.size, dtype=np.uint16))
            for arrays in inbox.arrays.values()
            for array in arrays
        )
        print(f"rank {rank} landed {landed_before} of {count} before the message, equal {equal}")


BIG = ("big", ((32_000_000,),))  # 64 MB: more than a slow link can have sent when its receiver is gone


def big_buffers():
    return [np.zeros(*BIG[1][0], np.uint16)]


def death_underway(messenger, inbox, rank):
    """Rank 2 dies while buffers are on their way to it and from it, as it sees its own placed and others see theirs."""
    if rank == 2:
        messenger.send_buffers(0, BIG, big_buffers())
        inbox.wait(lambda: BIG in inbox.placed and (0, "die") in inbox.messages)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        doomed = messenger.send_buffers(2, BIG, big_buffers())
        inbox.wait(lambda: BIG in inbox.placed)
        messenger.send(2, "die")
        inbox.wait(lambda: inbox.lost)
        try:
            doomed.result(DEADLINE_S)
            outcome = "sent"
        except PeerLost as error:
            outcome = str(error)
        messenger.send_buffers(1, ("still here", ((1000,),)), [np.zeros(1000, np.uint16)]).result(DEADLINE_S)
        whole = messenger.bytes_sent >= 64_000_000
        print(f"rank 0 lost {inbox.lost}, then: {outcome}, landed {inbox.landed}, all was sent {whole}")
    else:
        inbox.wait(lambda: inbox.landed and inbox.lost)
        print(f"rank 1 lost {inbox.lost}, landed {inbox.landed}")


def close_underway(messenger, inbox, rank):
    """Rank 0 closes with 64 MB left to send to rank 1."""
    if rank == 0:
        messenger.send_buffers(1, BIG, big_buffers())
        messenger.send(2, "farewell")
    elif rank == 1:
        inbox.wait(lambda: BIG in inbox.placed)
    else:
        inbox.wait(lambda: inbox.messages)
    begun = time.monotonic()
    quiet = messenger.close(0.5)
    print(f"rank {rank} quiet {quiet}, in time {time.monotonic() - begun < 10}", flush=True)
    MPI.COMM_WORLD.Barrier()  # a rank that leaves is a lost one to those who still close
    os._exit(0)  # MPI may not be finalised now


def close_after_the_rest(messenger, inbox, rank):
    """Rank 0 closes with 2 MB left to send to rank 1, and time for it."""
    shapes = ((1_000_000,),)
    if rank == 0:
        sent = messenger.send_buffers(1, ("rest", shapes), [np.ones(*shapes[0], np.uint16)])
        print(f"rank 0 quiet {messenger.close(DEADLINE_S)}, sent {sent.done()}")
    elif rank == 1:
        inbox.wait(lambda: inbox.landed)
        print(f"rank 1 landed {inbox.arrays['rest', shapes][0].sum()}")


CASES = {
    "order": order_and_sizes,
    "death": peer_death,
    "rate": at_the_rate,
    "death_underway": death_underway,
    "close_underway": close_underway,
    "close_after_the_rest": close_after_the_rest,
}


def main():
    comm = MPI.COMM_WORLD
    inbox = Inbox()
    messenger = Messenger(comm, inbox)
    for gbps in sys.argv[2:]:
        messenger.limit(float(gbps))
    messenger.start()
    CASES[sys.argv[1]](messenger, inbox, comm.Get_rank())
    begun = time.monotonic()
    messenger.close()
    assert time.monotonic() - begun < 3, "close took too long"
    assert messenger.failure is None, messenger.failure
    if inbox.lost:
        sys.stdout.flush()
        signal.alarm(LEAVE_S)  # MPI_Finalize, which comes now, may wait for the dead


main()
