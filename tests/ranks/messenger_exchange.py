"""Run by test_cache_messenger.py on three ranks: each prints one line of what it saw.

Arguments: the case, and the link's rate in Gbps where it has one.
"""

import os
import signal
import sys
import threading
import time
from concurrent.futures import CancelledError

import numpy as np
from mpi4py import MPI

from mooncake_jax.cache.messenger import Messenger, PeerLost

DEADLINE_S, LEAVE_S = 30.0, 5


class Inbox:
    def __init__(self):
        self.messages, self.placed, self.landed, self.broken, self.lost, self.arrays = [], [], [], [], [], {}
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

    def on_broken(self, source, header, reason):
        self._note(self.broken, (header, reason))

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
    end = outcome(messenger.send(2, "too late"))
    messenger.send(1 - rank, "still here")
    inbox.wait(lambda: (1 - rank, "still here") in inbox.messages)
    print(f"rank {rank} lost {inbox.lost}, then: {end}")


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
        end = outcome(doomed)
        messenger.send_buffers(1, ("still here", ((1000,),)), [np.zeros(1000, np.uint16)]).result(DEADLINE_S)
        whole = messenger.bytes_sent >= 64_000_000
        print(f"rank 0 lost {inbox.lost}, then: {end}, landed {inbox.landed}, all was sent {whole}")
        print(f"rank 0 broken {[(header[0], reason) for header, reason in inbox.broken]}")
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


def small(number):
    return ("small", ((1000,),), number)


def in_turns(messenger, inbox, rank):
    """Rank 0 posts a large transfer to rank 1, then small ones to both others."""
    if rank == 0:
        large = messenger.send_buffers(1, BIG, big_buffers())
        others = [messenger.send_buffers(to, small(0), [np.ones(1000, np.uint16)]) for to in (1, 2)]
        for future in others:
            future.result(DEADLINE_S)
        print(f"rank 0 sent the small ones, the large one {large.done()}")
        large.result(DEADLINE_S)
    elif rank == 1:
        inbox.wait(lambda: len(inbox.landed) == 2)
        print(f"rank 1 landed {[header[0] for header in inbox.landed]}")
    else:
        inbox.wait(lambda: inbox.landed)


def given_up(messenger, inbox, rank):
    """Rank 0 takes back two of its transfers to rank 1 and lets one pass its deadline; the others land whole."""
    numbers = range(6)
    if rank == 0:
        named = [(f"big {number}", BIG[1]) for number in numbers]
        sent = [messenger.send_buffers(1, named[0], big_buffers(), deadline_s=0.2)]
        sent += [messenger.send_buffers(1, header, big_buffers()) for header in named[1:]]
        unwanted = messenger.send_buffers(1, "unwanted", big_buffers())
        kept = [messenger.send_buffers(1, small(number), [np.ones(1000, np.uint16)]) for number in numbers]
        time.sleep(0.05)  # or nothing has left when they are taken back
        taken_back = [sent[1].cancel(), sent[2].cancel(), unwanted.cancel()]
        ends = [outcome(future) for future in (*sent[:3], unwanted)]
        for future in kept:
            future.result(DEADLINE_S)
        for future in sent[3:]:
            future.cancel()
        messenger.send(1, "end").result(DEADLINE_S)
        print(f"rank 0 took back {taken_back}: {ends}, again {sent[1].cancel()} {kept[0].cancel()}")
    elif rank == 1:
        inbox.wait(lambda: (0, "end") in inbox.messages and len(inbox.broken) == len(numbers))
        inbox.wait(lambda: len(inbox.landed) == len(numbers))
        whole = all(inbox.arrays[small(number)][0].all() for number in numbers)
        broken = sorted((header[0], reason) for header, reason in inbox.broken)
        print(f"rank 1 broken {broken}, landed {[header[0] for header in inbox.landed]}, whole {whole}")


def outcome(future):
    try:
        future.result(DEADLINE_S)
    except (CancelledError, PeerLost, TimeoutError) as error:
        return f"{type(error).__name__} {error}".strip()
    return "sent"


def stopped(messenger, inbox, rank):
    """Rank 1 stands still while a transfer to it passes its deadline; then it goes on, and hears of it."""
    if rank == 1:
        messenger.send(0, os.getpid()).result(DEADLINE_S)
        inbox.wait(lambda: inbox.broken and inbox.landed)
        print(f"rank 1 broken {inbox.broken}, landed {inbox.landed}")
    elif rank == 0:
        inbox.wait(lambda: inbox.messages)
        [(_, pid)] = inbox.messages
        os.kill(pid, signal.SIGSTOP)
        try:
            overdue = outcome(messenger.send_buffers(1, BIG, big_buffers(), deadline_s=0.5))
            later = messenger.send_buffers(1, small(0), [np.ones(1000, np.uint16)])
            waits = not later.done()
        finally:
            os.kill(pid, signal.SIGCONT)
        print(f"rank 0 {overdue}, the next waits {waits}: {outcome(later)}")


def anything(messenger, inbox, rank):
    """Ranks 0 and 1 send one another transfers of all sizes, some of which they take back or give too little time.
    What one says has been sent has landed whole at the other; of nothing is there news twice, or none.
    """
    if rank == 2:
        return
    rng, ends = np.random.default_rng(rank), {}
    for number in range(150):
        shapes = tuple((int(size),) for size in rng.integers(0, 1 << int(rng.integers(1, 21)), rng.integers(1, 4)))
        header = (rank * 1000 + number, shapes)
        buffers = [np.full(shape, number, np.uint16) for shape in shapes]
        deadline_s = float(rng.choice([0.0, 1e-3, 10.0]))
        ends[header] = messenger.send_buffers(1 - rank, header, buffers, deadline_s)
        if rng.random() < 0.3:
            threading.Timer(rng.random() * 0.01, ends[header].cancel).start()
        messenger.send(1 - rank, number)
    told = {header: outcome(future) for header, future in ends.items()}
    messenger.send(1 - rank, told).result(DEADLINE_S)
    inbox.wait(lambda: any(isinstance(message, dict) for _, message in inbox.messages))
    [theirs] = [message for _, message in inbox.messages if isinstance(message, dict)]
    inbox.wait(lambda: len(inbox.landed) + len(inbox.broken) == len(inbox.placed))
    landed, broken = set(inbox.landed), {header for header, _ in inbox.broken}
    whole = all((array == header[0] % 1000).all() for header in landed for array in inbox.arrays[header])
    sent = {header for header, end in theirs.items() if end == "sent"}
    kinds = {end.split()[0] for end in theirs.values()}
    once = len(landed) + len(broken) == len(inbox.placed) and not landed & broken
    in_order = [m for _, m in inbox.messages if isinstance(m, int)] == list(range(150))
    found = f"whole {whole}, sent and landed {sent <= landed}, once {once}, in order {in_order}, {sorted(kinds)}"
    print(f"rank {rank} {found}")


def unpicklable(messenger, inbox, rank):
    """What cannot be sent is told to the caller, and the messenger goes on."""
    if rank == 0:
        try:
            messenger.send(1, threading.Lock())
        except TypeError as error:
            print(f"rank 0 {type(error).__name__}, then {outcome(messenger.send(1, 'next'))}")
    elif rank == 1:
        inbox.wait(lambda: (0, "next") in inbox.messages)


CASES = {
    "in_turns": in_turns,
    "given_up": given_up,
    "stopped": stopped,
    "anything": anything,
    "unpicklable": unpicklable,
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


if __name__ == "__main__":
    main()
