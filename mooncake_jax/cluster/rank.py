"""One MPI rank as a Cluster: a clock, timers, a mailbox, and the hardware its actor commands.

The main thread runs serve(): it waits for the next message, lets the actor handle it and performs the actions. Work
is done elsewhere: sending and receiving on the messenger's thread, computing on the hardware's threads, which post
what came of it to the mailbox.
"""

import abc
import heapq
import itertools
import signal
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from mooncake_jax.cache.mailbox import Mailbox
from mooncake_jax.cache.messenger import Messenger
from mooncake_jax.cache.one_sided import LentMemory
from mooncake_jax.cache.transport import HostTransport, Transport
from mooncake_jax.cache.wire import Buffer
from mooncake_jax.cluster.launch import STOP_SIGNAL
from mooncake_jax.sched.actions import Action, Later, Send
from mooncake_jax.sched.messages import Message

SETUP_DEADLINE_S = 300.0  # for rank 0 to read its input, and for all others to be ready
POLL_S = 0.5  # the main thread looks at least this often for signals and a failed messenger


class Hardware(Protocol):
    """What an instance's actor commands: engine, store, transfers."""

    def perform(self, action: Action) -> None:
        """Begin the action and return; post what comes of it."""

    def on_control(self, source: int, message: Any) -> bool:
        """A message beside the actors' own; False if it is not for the hardware. Called on the messenger's thread."""

    def place(self, source: int, header: Any) -> Sequence[np.ndarray] | None: ...

    def on_buffers(self, source: int, header: Any, buffers: Sequence[np.ndarray]) -> None: ...

    def close(self, deadline_s: float) -> None:
        """The run is over: end what must not be lost, for so long at most."""


class Clock:
    """Seconds since the start of the run."""

    def __init__(self):
        self.zero = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self.zero


class Interrupt:
    """Ctrl-C, or the launcher asking the ranks to stop."""


class PeerGone:
    def __init__(self, rank: int):
        self.rank = rank


class Rank(abc.ABC):
    """Mailbox, messenger and timers of one rank; subclasses say what their role does with control messages."""

    def __init__(self, comm: MPI.Comm):
        self.rank = comm.Get_rank()
        self.clock = Clock()
        self.nodes: tuple[str, ...] = ()  # names by rank, once known
        self.hardware: Hardware | None = None
        self.transport: Transport = HostTransport()
        self.lent: LentMemory | None = None
        self._mailbox = Mailbox()
        self._timers: list[tuple[float, int, Message]] = []
        self._ties = itertools.count()
        self.messenger = Messenger(comm, self)
        self.messenger.start()
        for signum in (signal.SIGINT, signal.SIGTERM, STOP_SIGNAL):
            signal.signal(signum, lambda *_: self._mailbox.put(Interrupt()))

    @property
    def node(self) -> str:
        return self.nodes[self.rank]

    # --- for the hardware and the role

    def post(self, message: Any) -> None:
        """Put a message into this rank's own mailbox, from any thread."""
        self._mailbox.put(message)

    def send(self, node: str, message: Any) -> Future:
        return self.messenger.send(self.nodes.index(node), message)

    def send_buffers(self, node: str, header: Any, buffers: Sequence[Buffer]) -> Future:
        return self.messenger.send_buffers(self.nodes.index(node), header, buffers)

    def can_read(self, node: str) -> bool:
        return self.lent is not None and self.lent.works(self.nodes.index(node))

    def read(self, node: str, offset: int, out: np.ndarray, deadline_s: float) -> Future:
        return self.messenger.read(self.nodes.index(node), offset, out, deadline_s)

    def receive(self, deadline: float) -> Any | None:
        """The next thing in the mailbox, or None at the deadline (monotonic clock)."""
        while True:
            received = self._mailbox.get(min(POLL_S, deadline - time.monotonic()))
            if received is not None:
                return received
            if self.messenger.failure is not None:
                raise RuntimeError("the messenger failed") from self.messenger.failure
            if time.monotonic() >= deadline:
                return None

    # --- Cluster

    def next_event(self) -> tuple[float, str, Message] | None:
        while True:
            due = self._timers[0][0] if self._timers else float("inf")
            received = self.receive(min(self.clock.zero + due, time.monotonic() + POLL_S))
            if received is None:
                if self.clock.now() < due:
                    continue
                _, _, received = heapq.heappop(self._timers)
            over, message = self.on_received(received)
            if over:
                return None
            if message is not None:
                return self.clock.now(), self.node, message

    def perform(self, node: str, action: Action, now: float) -> None:
        match action:
            case Send(to, message) if to == node:
                self.post(message)
            case Send(to, message):
                self.send(to, message)
            case Later(seconds, message):
                self.at(now + seconds, message)
            case _:
                self.hardware.perform(action)

    def at(self, when: float, message: Any) -> None:
        """Handle this message at that time."""
        heapq.heappush(self._timers, (when, next(self._ties), message))

    def drop_timers(self) -> None:
        self._timers.clear()

    @abc.abstractmethod
    def on_received(self, received: Any) -> tuple[bool, Message | None]:
        """(whether the run is over, the message for the actor if it is one)."""

    # --- Receiver, on the messenger's thread

    def on_message(self, source: int, message: Any) -> None:
        if self.hardware is None or not self.hardware.on_control(source, message):
            self._mailbox.put(message)

    def place(self, source: int, header: Any) -> Sequence[np.ndarray] | None:
        return self.hardware.place(source, header) if self.hardware is not None else None

    def on_buffers(self, source: int, header: Any, buffers: Sequence[np.ndarray]) -> None:
        self.hardware.on_buffers(source, header, buffers)

    def on_broken(self, source: int, header: Any, reason: str) -> None:
        """Its sender says so in its own words, or is lost: either ends what the buffers were for."""

    def on_lost(self, rank: int) -> None:
        self._mailbox.put(PeerGone(rank))
