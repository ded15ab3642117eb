"""The rank of a decoding instance or of a prefill instance's stage: becomes what Conductor's rank tells it to be, then
serves until it is told to stop.
"""

import platform
import time
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from mooncake_jax.cache.one_sided import LentMemory
from mooncake_jax.cluster.config import ClusterConfig, instance_of
from mooncake_jax.cluster.control import (
    Begin,
    Bye,
    EventLines,
    Join,
    Ping,
    Pong,
    Setup,
    SetupFailed,
    StageBroken,
    Stop,
)
from mooncake_jax.cluster.rank import SETUP_DEADLINE_S, Interrupt, PeerGone, Rank
from mooncake_jax.cluster.record import Recorded
from mooncake_jax.cluster.roles import become
from mooncake_jax.errors import UsageError
from mooncake_jax.parallel.processes import leave_processes
from mooncake_jax.sched.messages import CONDUCTOR, Message
from mooncake_jax.sched.serve import serve

CLOSE_S = 2.0  # for the SSD tier to end what it writes
INTERRUPT_GRACE_S = 3.0  # for Conductor's rank to end the run in good order
PINGS = 8
FLUSH_LINES, FLUSH_S = 200, 1.0


class InstanceLost(Exception):
    """This rank's instance cannot go on."""


@dataclass(frozen=True)
class _Lent:
    memory: LentMemory


class InstanceRank(Rank):
    def __init__(self, comm: MPI.Comm):
        super().__init__(comm)
        self._lines: list[str] = []
        self._flushed = time.monotonic()
        self._orphaned = False  # rank 0 is gone

    def run(self) -> int:
        """Exit code: 0 after Stop, whatever led to it: rank 0 says what went wrong. 1 if rank 0 is gone."""
        setup = self._expect(Setup)
        if setup is None:
            return self._early_end()
        self.nodes = setup.config.nodes
        if setup.config.link_gbps is not None:
            self.messenger.limit(setup.config.link_gbps)
        try:
            actor, self.hardware, ready = become(self, setup)
        except Exception as error:
            self.send(CONDUCTOR, SetupFailed(self.node, _one_line(error), isinstance(error, UsageError)))
            self._expect(Stop)
            return self._early_end()
        offset = self._clock_offset(setup.host)
        self.send(CONDUCTOR, ready)
        begin = self._expect(Begin)
        if begin is None:
            return self._early_end()
        self.clock.zero = begin.zero - offset
        serve({self.node: Recorded(self.node, actor, self._record)} if actor is not None else {}, self)
        self._flush()
        self.hardware.close(CLOSE_S)
        self.send(CONDUCTOR, Bye(self.rank, self.messenger.bytes_sent))
        if self._shares_runtime(setup.config) and not self._orphaned:
            leave_processes()
        return 1 if self._orphaned else 0

    def _shares_runtime(self, config: ClusterConfig) -> bool:
        return config.stages > 1 and self.node not in config.decoding_nodes

    def _early_end(self) -> int:
        self.messenger.send(0, Bye(self.rank, self.messenger.bytes_sent))
        return 0

    def _expect(self, kind: type) -> Any | None:
        """The next message of this kind, others kept for later; None if the run is over before it starts."""
        deadline, others = time.monotonic() + SETUP_DEADLINE_S, []
        while (received := self.receive(deadline)) is not None:
            if isinstance(received, kind):
                for other in others:
                    self.post(other)
                return received
            if isinstance(received, Stop | Interrupt) or (
                isinstance(received, PeerGone) and received.rank in (0, self.rank)
            ):
                return None
            others.append(received)
        return None

    def expect_join(self) -> Join:
        """Raises InstanceLost if the run ends before it comes."""
        join = self._expect(Join)
        if join is None:
            raise InstanceLost(f"{instance_of(self.node)} gave no address to join")
        return join

    def lend(self, nbytes: int) -> LentMemory:
        """Lend memory to the other ranks, once all of them are here. Raises InstanceLost if the run ends before."""
        future = self.messenger.lend(nbytes, SETUP_DEADLINE_S)
        future.add_done_callback(lambda ended: self.post(_Lent(ended.result())))
        lent = self._expect(_Lent)
        if lent is None:
            raise InstanceLost("the run ended before all ranks had come")
        self.lent = lent.memory
        return lent.memory

    def _clock_offset(self, host: str) -> float:
        """What to add to this rank's monotonic clock to get rank 0's, from the quickest of a few round trips."""
        if platform.node() == host:
            return 0.0
        samples = []
        for _ in range(PINGS):
            self.send(CONDUCTOR, Ping(self.node, time.monotonic()))
            pong = self._expect(Pong)
            if pong is None:
                break
            received = time.monotonic()
            samples.append((received - pong.sent, pong.clock - (pong.sent + received) / 2))
        return min(samples)[1] if samples else 0.0

    # --- serving

    def on_received(self, received: Any) -> tuple[bool, Message | None]:
        if time.monotonic() - self._flushed > FLUSH_S:
            self._flush()
        match received:
            case Stop():
                return True, None
            case Interrupt():
                self.at(self.clock.now() + INTERRUPT_GRACE_S, Stop())
                return False, None
            case PeerGone(rank=rank):
                if rank == self.rank:
                    raise RuntimeError("the messenger failed") from self.messenger.failure
                if instance_of(self.nodes[rank]) == instance_of(self.node):
                    raise InstanceLost(f"{self.nodes[rank]} is gone, and {self.node} computes with it")
                self._orphaned = rank == 0
                return self._orphaned, None
            case StageBroken(reason):
                raise InstanceLost(reason)
        return False, received

    def _record(self, line: str) -> None:
        self._lines.append(line)
        if len(self._lines) >= FLUSH_LINES:
            self._flush()

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        if self._lines:
            self.send(CONDUCTOR, EventLines(tuple(self._lines)))
            self._lines = []


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, UsageError) else f"{type(error).__name__}: {text}"
