"""The two ranks of pool_transfers.py. Rank 0 prints its figures as JSON.

Arguments: "messenger" for what MPI does by itself, then what the messenger makes of it, in turns; or "stores" for puts
into and gets from the other rank's memory; and how many turns.
"""

import json
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from mooncake_jax.cache.messenger import Messenger

BLOCK, SLICE, SMALL = 20 << 20, 5 << 18, 4096  # bytes: a block, a layer's slice of it, and what is none
COUNTS = {BLOCK: 16, SLICE: 64}  # sent in a row
DEADLINE_S = 60.0
CONTROL_EVERY_S, CONTROL_BURST, CONTROL_MESSAGES = 1e-3, 12, 12_000
IDLE_S = 2.0
READS = 20
STORED, STORE_REPEATS = (SMALL, SLICE, BLOCK), 12


class Inbox:
    """Lets buffers land in memory that is there already, and keeps when messages came."""

    def __init__(self, memory: dict[int, list[np.ndarray]]):
        self.memory = memory
        self._changed = threading.Condition()
        self.times: list[tuple[float, float]] = []  # when a message with its time came, and that time
        self.counts: Counter[object] = Counter()  # of other messages
        self.messenger: Messenger | None = None
        self.figures: dict[str, float] | None = None
        self.landed = 0

    def on_message(self, source, message):
        if isinstance(message, float):  # thousands a second, for which nobody waits
            self.times.append((time.monotonic(), message))
            return
        with self._changed:
            if isinstance(message, dict):
                self.figures = message
            else:
                self.counts[message] += 1
            self._changed.notify_all()
        if isinstance(message, int):  # a get
            self.messenger.send_buffers(source, ("got", message), [self.memory[message][0]])

    def place(self, source, header):
        what, size, *number = header
        return [self.memory[size][number[0] if number else 0]]

    def on_buffers(self, source, header, buffers):
        with self._changed:
            self.landed += 1
            self._changed.notify_all()
        if header[0] == "put":
            self.messenger.send(source, "stored")

    def on_broken(self, source, header, reason):
        raise RuntimeError(reason)

    def on_lost(self, rank):
        raise RuntimeError(f"rank {rank} is lost")

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            if not self._changed.wait_for(condition, DEADLINE_S):
                raise TimeoutError("the other rank did not answer")


class Pair:
    """One rank of the two, with memory to send from and receive into."""

    def __init__(self, comm: MPI.Comm):
        self.comm, self.first = comm, comm.rank == 0
        counts = COUNTS | {SMALL: 1}
        self.memory = {size: [np.ones(size, np.uint8) for _ in range(count)] for size, count in counts.items()}

    def raw(self, size: int) -> float:
        """Seconds for all buffers of a size, one after the other, and an answer."""
        answer, begun = np.zeros(1, np.uint8), time.monotonic()
        for buffer in self.memory[size]:
            if self.first:
                self.comm.Send([buffer, MPI.BYTE], 1)
            else:
                self.comm.Recv([buffer, MPI.BYTE], 0)
        if self.first:
            self.comm.Recv([answer, MPI.BYTE], 1)
        else:
            self.comm.Send([answer, MPI.BYTE], 0)
        return time.monotonic() - begun


class Talk:
    """A messenger's turn."""

    def __init__(self, pair: Pair):
        self.pair, self.inbox = pair, Inbox(pair.memory)
        self.messenger = self.inbox.messenger = Messenger(pair.comm, self.inbox)
        self.messenger.start()
        self._marks = self._meetings = self._landed = 0  # that must have come by now: the other rank may be ahead

    def meet(self) -> None:
        """Wait until the other rank has come so far, without a call of MPI beside the messenger's."""
        self._meetings += 1
        self.messenger.send(1 - self.pair.comm.rank, "here")
        self.inbox.wait(lambda: self.inbox.counts["here"] >= self._meetings)

    def close(self) -> None:
        self.meet()
        self.messenger.close()
        if self.messenger.failure is not None:
            raise self.messenger.failure

    def mark(self) -> None:
        """The second rank tells the first that it has come so far."""
        self._marks += 1
        if self.pair.first:
            self.inbox.wait(lambda: self.inbox.counts["mark"] >= self._marks)
        else:
            self.messenger.send(0, "mark").result(DEADLINE_S)

    def bulk(self, size: int) -> float:
        begun = time.monotonic()
        self._landed += COUNTS[size]
        if self.pair.first:
            sent = [
                self.messenger.send_buffers(1, ("block", size, i), [b]) for i, b in enumerate(self.pair.memory[size])
            ]
            for future in sent:
                future.result(DEADLINE_S)
        else:
            self.inbox.wait(lambda: self.inbox.landed == self._landed)
        self.mark()
        return time.monotonic() - begun

    def put(self, size: int) -> float:
        begun, stored = time.monotonic(), self.inbox.counts["stored"]
        self.messenger.send_buffers(1, ("put", size), [self.pair.memory[size][0]])
        self.inbox.wait(lambda: self.inbox.counts["stored"] > stored)
        return time.monotonic() - begun

    def get(self, size: int) -> float:
        begun, landed = time.monotonic(), self.inbox.landed
        self.messenger.send(1, size)
        self.inbox.wait(lambda: self.inbox.landed > landed)
        return time.monotonic() - begun

    def control(self) -> dict[str, float]:
        """Messages at a steady rate while blocks flow."""
        stop, moved = threading.Event(), [0]
        if self.pair.first:
            flow = threading.Thread(target=self._flow, args=(stop, moved))
            flow.start()
            begun = time.monotonic()
            for number in range(0, CONTROL_MESSAGES, CONTROL_BURST):
                for _ in range(CONTROL_BURST):
                    self.messenger.send(1, time.monotonic())
                time.sleep(max(begun + (number / CONTROL_BURST + 1) * CONTROL_EVERY_S - time.monotonic(), 0))
            seconds = time.monotonic() - begun
            stop.set()
            flow.join()
            self.messenger.send(1, "end")
            self.inbox.wait(lambda: self.inbox.figures is not None)
            return self.inbox.figures | {"bulk": moved[0] / seconds}
        self.inbox.wait(lambda: self.inbox.counts["end"] > 0)
        came = self.inbox.times
        rate = len(came) / (came[-1][0] - came[0][1])
        latencies = [when - sent for when, sent in came]
        found = {"rate": rate, "latency": statistics.median(latencies), "worst": max(latencies)}
        self.messenger.send(0, found).result(DEADLINE_S)
        return found

    def _flow(self, stop: threading.Event, moved: list[int]) -> None:
        blocks = self.pair.memory[BLOCK]
        sent, number = [], 0
        while not stop.is_set():
            sent.append(
                self.messenger.send_buffers(1, ("block", BLOCK, number % len(blocks)), [blocks[number % len(blocks)]])
            )
            number += 1
            if len(sent) > 2:
                sent.pop(0).result(DEADLINE_S)
                moved[0] += BLOCK
        for future in sent:
            future.result(DEADLINE_S)

    def idle(self) -> float:
        """Share of a core."""
        self.meet()
        time.sleep(0.1)
        begun, used = time.monotonic(), time.process_time()
        time.sleep(IDLE_S)
        return (time.process_time() - used) / (time.monotonic() - begun)

    def reads(self) -> dict[str, float]:
        """Of a block in the second rank's memory, while that rank rests and while it computes."""
        lent = self.messenger.lend(0 if self.pair.first else BLOCK, DEADLINE_S).result(DEADLINE_S + 1)
        figures: dict[str, float] = {}
        if not self.pair.first:
            lent.memory[:] = 1
        for turn, owner in enumerate(("resting", "computing"), start=1):
            self.mark()
            if self.pair.first:
                if lent.works(1):
                    figures[owner] = self._read()
                self.messenger.send(1, "read").result(DEADLINE_S)
            else:
                self._own(turn, computing=owner == "computing")
        return figures

    def _own(self, turn: int, computing: bool) -> None:
        """Rest or compute until the first rank has read for the so-manieth time."""

        def done() -> bool:
            return self.inbox.counts["read"] == turn

        matrix = np.ones((256, 256), np.float32)
        while computing and not done():
            matrix = matrix @ matrix / 256
        self.inbox.wait(done)

    def _read(self) -> float:
        out, seconds = np.zeros(BLOCK, np.uint8), []
        for _ in range(READS):
            begun = time.monotonic()
            self.messenger.read(1, 0, out).result(DEADLINE_S)
            seconds.append(time.monotonic() - begun)
        if not out.all():
            raise RuntimeError("the read brought something else")
        return statistics.median(seconds)


def messenger_figures(pair: Pair, note: Callable[[str, float], None]) -> None:
    """One turn."""
    raw = {size: pair.raw(size) for size in COUNTS}
    talk = Talk(pair)
    bulk = {size: talk.bulk(size) for size in COUNTS}
    control, idle, reads = talk.control(), talk.idle(), talk.reads()
    talk.close()
    for size, count in COUNTS.items():
        note(f"raw {size}", size * count / raw[size])
        note(f"ours {size}", size * count / bulk[size])
    for kind, found in (("control", control), ("read", reads)):
        for name, value in found.items():
            note(f"{kind} {name}", value)
    note("idle", idle)


def store_figures(pair: Pair, note: Callable[[str, float], None]) -> None:
    """One turn: seconds of a put, to the news that it has landed, and of a get."""
    talk = Talk(pair)
    for size in STORED if pair.first else ():
        for number in range(STORE_REPEATS + 1):
            put, got = talk.put(size), talk.get(size)
            if number:
                note(f"put {size}", put)
                note(f"get {size}", got)
    talk.close()


def main(what: str, turns: str) -> None:
    pair, figures = Pair(MPI.COMM_WORLD), {}
    measure = {"messenger": messenger_figures, "stores": store_figures}[what]
    measure(pair, lambda name, value: None)  # it warms up
    for _ in range(int(turns)):
        measure(pair, lambda name, value: figures.setdefault(name, []).append(value))
    if pair.first:
        print(json.dumps({name: statistics.median(values) for name, values in figures.items()}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
