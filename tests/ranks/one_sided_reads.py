"""Run by test_cache_one_sided.py on three ranks: each prints what it saw. Argument: the case."""

import os
import signal
import sys
import time

import numpy as np
from messenger_exchange import DEADLINE_S, Inbox, outcome
from mpi4py import MPI

from mooncake_jax.cache.messenger import Messenger
from mooncake_jax.cache.one_sided import Lending

NBYTES = 3 * (1 << 20) + 77


def lent(messenger, nbytes, deadline_s=DEADLINE_S):
    return messenger.lend(nbytes, deadline_s).result(DEADLINE_S + 5)


def content(rank):
    return np.random.default_rng(rank).integers(0, 256, NBYTES, np.uint8)


def tell_ready(messenger, inbox, others):
    """Wait until all have filled their memory."""
    for rank in others:
        messenger.send(rank, "ready")
    inbox.wait(lambda: sum(message == "ready" for _, message in inbox.messages) == 2)


def reads(messenger, inbox, rank, others):
    """Ranks 1 and 2 lend; all read what the others lend, whole and in part, and once while its owner stands still."""
    memory = lent(messenger, NBYTES if rank else 0)
    zero = not memory.memory.any()
    memory.memory[:] = content(rank)[: memory.memory.size]
    tell_ready(messenger, inbox, others)
    equal = True
    for owner in set(others) - {0}:
        whole, part = np.zeros(NBYTES, np.uint8), np.zeros((3, 7), np.uint16)
        wanted = ((0, whole), (1001, part), (5, part[:0]))
        for future in [messenger.read(owner, offset, out) for offset, out in wanted]:
            future.result(DEADLINE_S)
        equal &= np.array_equal(whole, content(owner))
        equal &= part.tobytes() == content(owner)[1001 : 1001 + part.nbytes].tobytes()
    works = [memory.works(owner) for owner in range(3)]
    print(f"rank {rank} lends {memory.memory.size}, zero {zero}, works {works}, equal {equal}")
    print(f"rank {rank} note: {memory.note}")
    if rank == 1:
        messenger.send(0, os.getpid()).result(DEADLINE_S)
        inbox.wait(lambda: (0, "go on") in inbox.messages)
    elif rank == 0:
        read_from_a_rank_that_stands_still(messenger, inbox)


def read_from_a_rank_that_stands_still(messenger, inbox):
    inbox.wait(lambda: isinstance(inbox.messages[-1][1], int))
    pid, out = inbox.messages[-1][1], np.zeros(NBYTES, np.uint8)
    os.kill(pid, signal.SIGSTOP)
    try:
        end = outcome(messenger.read(1, 0, out, deadline_s=10.0))
    finally:
        os.kill(pid, signal.SIGCONT)
    print(f"rank 0 read from one that stands still: {end}, equal {np.array_equal(out, content(1))}")
    messenger.send(1, "go on").result(DEADLINE_S)


def refused(messenger, inbox, rank, others):
    """What rank 0 may not read, and what it gives up."""
    if rank == 0:
        try:
            messenger.read(1, 0, np.zeros(1, np.uint8))
        except ValueError as error:
            print(f"rank 0 before: {error}")
    lent(messenger, 1 << 26 if rank == 1 else 0)
    tell_ready(messenger, inbox, others)
    if rank:
        return
    for owner, offset, nbytes in ((2, 0, 1), (1, -1, 1), (1, (1 << 26) - 1, 2)):
        try:
            messenger.read(owner, offset, np.zeros(nbytes, np.uint8))
        except ValueError as error:
            print(f"rank 0: {error}")
    pending = [messenger.read(1, 0, np.zeros(1 << 26, np.uint8), deadline_s) for deadline_s in (None, 0.0)]
    cancelled = pending[0].cancel()
    ends = [outcome(future) for future in pending]
    last = np.ones(1 << 26, np.uint8)
    print(f"rank 0 cancelled {cancelled}: {ends}, then {outcome(messenger.read(1, 0, last))}, zero {not last.any()}")


def absent(messenger, inbox, rank, others):
    """Rank 2 never comes."""
    if rank == 2:
        inbox.wait(lambda: len(inbox.messages) == 2)
        return
    begun = time.monotonic()
    memory = lent(messenger, 1000, 1.0)
    in_time = time.monotonic() - begun < 10
    print(f"rank {rank} in time {in_time}, lends {memory.memory.size}, works {memory.works(1 - rank)}: {memory.note}")
    messenger.send(2, "done").result(DEADLINE_S)


def death(messenger, inbox, rank, others):
    """Rank 2 dies before it comes; the others do without windows, and still reach one another."""
    if rank == 2:
        inbox.wait(lambda: len(inbox.messages) == 2)
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    pending = messenger.lend(1000, 5.0)
    time.sleep(0.2)  # it dies while the others wait for it
    messenger.send(2, "die")
    memory = pending.result(DEADLINE_S)
    inbox.wait(lambda: inbox.lost)
    messenger.send(1 - rank, "still here")
    inbox.wait(lambda: (1 - rank, "still here") in inbox.messages)
    print(f"rank {rank} lost {inbox.lost}, lends {memory.memory.size}, works {memory.works(1 - rank)}")


def stuck(messenger, inbox, rank, others):
    """Rank 2 comes, and then does nothing more for the window."""
    if rank == 2:
        Lending._together = lambda self: time.sleep(DEADLINE_S)
    begun = time.monotonic()
    memory = lent(messenger, 1000, 2.0)
    in_time = time.monotonic() - begun < 15
    print(f"rank {rank} in time {in_time}, lends {memory.memory.size}, works {memory.works(0)}: {memory.note}")
    tell_ready(messenger, inbox, others)


def death_of_an_owner(messenger, inbox, rank, others):
    """Rank 2 dies after it has lent."""
    memory = lent(messenger, NBYTES if rank == 2 else 0)
    tell_ready(messenger, inbox, others)
    if rank == 2:
        inbox.wait(lambda: sum(message == "die" for _, message in inbox.messages) == 2)
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    worked = memory.works(2)
    messenger.send(2, "die")
    inbox.wait(lambda: inbox.lost)
    print(f"rank {rank} worked {worked}: {outcome(messenger.read(2, 0, np.zeros(10, np.uint8)))}")


def limited(messenger, inbox, rank, others):
    """Rank 1's link is modelled."""
    if rank == 1:
        messenger.limit(1.0)
    memory = lent(messenger, 1000)
    print(f"rank {rank} works {[memory.works(owner) for owner in range(3)]}: {memory.note}")


def main():
    case = {
        "reads": reads, "refused": refused, "absent": absent, "stuck": stuck,
        "death": death, "death_of_an_owner": death_of_an_owner, "limited": limited,
    }[sys.argv[1]]  # fmt: skip
    comm, inbox = MPI.COMM_WORLD, Inbox()
    messenger = Messenger(comm, inbox)
    messenger.start()
    rank = comm.Get_rank()
    case(messenger, inbox, rank, [other for other in range(3) if other != rank])
    messenger.close()
    assert messenger.failure is None, messenger.failure
    sys.stdout.flush()
    if inbox.lost or case in (absent, stuck):
        os._exit(0)  # MPI_Finalize would wait for the dead, and for the barrier that one has not come to


if __name__ == "__main__":
    main()
