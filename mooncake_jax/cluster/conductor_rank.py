"""Rank 0: Conductor, and the front end that feeds it requests and writes down how they end."""

import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mpi4py import MPI

from mooncake_jax import metrics
from mooncake_jax.cluster.config import ClusterConfig, instance_of
from mooncake_jax.cluster.control import (
    Begin,
    Bye,
    EventLines,
    ForgetBlocks,
    Measured,
    Ping,
    Pong,
    Ready,
    Setup,
    SetupFailed,
    Stop,
)
from mooncake_jax.cluster.frontend import ServingLimits
from mooncake_jax.cluster.rank import SETUP_DEADLINE_S, Interrupt, PeerGone, Rank
from mooncake_jax.cluster.record import Recorded
from mooncake_jax.cluster.results import Results
from mooncake_jax.cluster.ssd_contents import SSDContents
from mooncake_jax.errors import UsageError
from mooncake_jax.request import FAILED, Outcome, Request
from mooncake_jax.sched.actions import Action, Report
from mooncake_jax.sched.conductor import Conductor
from mooncake_jax.sched.cost import CostModel
from mooncake_jax.sched.cost_padded import PaddedCost, padded_prefills, padded_steps
from mooncake_jax.sched.fitting import fit_prefill, fit_step, fit_transfer
from mooncake_jax.sched.messages import (
    Arrived,
    BlocksPromoted,
    BlocksWritten,
    Interrupted,
    Message,
    NodeLost,
    SSDReported,
)
from mooncake_jax.sched.serve import serve

STOP_DEADLINE_S = 5.0
WRITE_BEHIND_S = 30.0  # after the last request has ended, for what SSDs are still to keep
INTERRUPTED_DEADLINE_S = 1.5


class Progress(Protocol):
    """Where the counts of ended requests are shown."""

    def update(self, *, completed: int, running: int, rejected: int, failed: int) -> None: ...


class Interruption(Exception):
    """The user stopped the run before it began."""


class SetupError(Exception):
    """An instance could not start, through no fault of the user's input."""


class ConductorRank(Rank):
    """Call set_up, then run, and stop in any case."""

    def __init__(self, comm: MPI.Comm):
        super().__init__(comm)
        self.interrupted = False
        self._alive = set(range(1, comm.Get_size()))
        self._lost: set[str] = set()  # instances
        self._warned: set[tuple[str, str]] = set()  # instances and how their SSD has failed
        self._sent_bytes: dict[int, int] = {}  # by rank
        self._arriving: dict[str, Request] = {}  # not given to Conductor yet
        self._unended = 0
        self._ended_at = 0.0

    @property
    def sent_bytes(self) -> dict[str, int]:
        """What each other rank has sent, by its name, once it has stopped in good order."""
        return {self.nodes[rank]: sent for rank, sent in sorted(self._sent_bytes.items())}

    # --- setting up

    def set_up(
        self, config: ClusterConfig, cost: CostModel | None, longest_prompt: int, say: Callable[[str], None]
    ) -> dict[str, Ready]:
        """Make every rank an instance and wait until all are ready. cost: None to have it measured. Raises UsageError,
        Interruption or SetupError.
        """
        self.nodes = config.nodes
        for node in self.nodes[1:]:
            self.send(node, Setup(config, cost, longest_prompt, platform.node()))
        if config.lends_dram:
            self.messenger.lend(0, SETUP_DEADLINE_S)  # all ranks make the window
        ready: dict[str, Ready] = {}
        deadline = time.monotonic() + SETUP_DEADLINE_S
        while len(ready) < len(self.nodes) - 1:
            match self.receive(deadline):
                case Ready() as message:
                    ready[message.node] = message
                    warmed = f"{message.compiled} shapes warmed up in {message.warm_up_s:.1f} s"
                    say(f"{message.node} is ready, {warmed} ({len(ready)} of {len(self.nodes) - 1})")
                    if message.ssd_blocks or message.ssd_foreign:
                        say(f"{message.node}: {_ssd_line(message)}")
                    if message.dram is not None:
                        say(f"{message.node}: other prefill instances' DRAM is {message.dram}")
                case Ping(node, sent):
                    self.send(node, Pong(sent, time.monotonic()))
                case SetupFailed(node, reason, usage):
                    raise UsageError(reason) if usage else SetupError(f"{node} could not start: {reason}")
                case PeerGone(rank=rank):
                    self._alive.discard(rank)
                    raise SetupError(f"{self.nodes[rank]} died while starting")
                case Interrupt():
                    raise Interruption
                case None:
                    late = ", ".join(sorted(set(self.nodes[1:]) - set(ready)))
                    raise SetupError(f"not ready after {SETUP_DEADLINE_S:g} s: {late}")
        return ready

    # --- the run

    def run(
        self,
        conductor: Conductor,
        requests: Sequence[Request],
        limits: ServingLimits,
        ssd: Mapping[str, SSDContents],
        results: Results,
        progress: Progress,
    ) -> float:
        """Serve all requests; returns the seconds from the start to the last ending. ssd: by prefill instance."""
        self._conductor = conductor
        self._results, self._progress = results, progress
        self._arriving = {request.id: request for request in requests}
        self._unended = len(requests)
        self.clock.zero = time.monotonic()
        for node in self.nodes[1:]:
            self.send(node, Begin(self.clock.zero))
        for instance, contents in ssd.items():
            self._report_ssd(instance, contents)
        for request in requests:
            self.at(request.arrival, Arrived(request, limits.why_invalid(request)))
        recorded = Recorded(self.node, conductor, lambda line: results.add_events([line]))
        serve({self.node: recorded}, self)
        if conductor.reservations.writing and not self.interrupted:
            print("mooncake-jax: the run is over before SSDs had stored all blocks", file=sys.stderr, flush=True)
        return self._ended_at

    def _report_ssd(self, instance: str, contents: SSDContents) -> None:
        for node, keys in contents.useless.items():
            if keys:
                self.send(node, ForgetBlocks(keys))
        if contents.stored:
            self.at(0.0, SSDReported(instance, contents.stored))

    def next_event(self) -> tuple[float, str, Message] | None:
        event = super().next_event() if self._unended or self._still_writing() else None
        if event is not None and isinstance(event[2], Arrived):
            del self._arriving[event[2].request.id]
        return event

    def _still_writing(self) -> bool:
        return self._conductor.reservations.writing and not self.interrupted

    def perform(self, node: str, action: Action, now: float) -> None:
        if isinstance(action, Report):
            self._end(action.outcome)
        else:
            super().perform(node, action, now)

    def _end(self, outcome: Outcome) -> None:
        self._unended -= 1
        if not self._unended:
            self._ended_at = self.clock.now()
            self.at(self._ended_at + WRITE_BEHIND_S, Stop())
        counts = self._results.add(outcome)
        self._progress.update(running=len(self._conductor.open), **counts)

    def on_received(self, received: Any) -> tuple[bool, Message | None]:
        match received:
            case Stop():
                return True, None
            case EventLines(lines):
                self._results.add_events(lines)
                return False, None
            case PeerGone(rank=rank):
                if rank == self.rank:
                    raise RuntimeError("the messenger failed") from self.messenger.failure
                return False, self._lose(rank)
            case Interrupt():
                return False, self._interrupt()
            case BlocksPromoted(node=node, reason=str(reason)) | BlocksWritten(node=node, reason=str(reason)):
                self._warn(node, reason)
        return False, received

    def _warn(self, node: str, reason: str) -> None:
        """Once a node and kind: a disk that fails once fails often. summary.json counts the blocks that could not be
        read or written.
        """
        kind = node, reason.partition(",")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            print(f"mooncake-jax: {node}: {reason}", file=sys.stderr, flush=True)

    def _lose(self, rank: int) -> Message | None:
        """An instance is lost with the first of its ranks."""
        self._alive.discard(rank)
        node, instance = self.nodes[rank], instance_of(self.nodes[rank])
        if instance in self._lost:
            return None
        self._lost.add(instance)
        stage = f": {node} has died" if node != instance else ""
        print(f"mooncake-jax: {instance} is lost{stage}", file=sys.stderr, flush=True)
        return NodeLost(instance)

    def _interrupt(self) -> Message:
        """What has not arrived ends here; Conductor ends the rest."""
        self.interrupted = True
        self.drop_timers()
        for request in self._arriving.values():
            self._end(metrics.outcome(request, FAILED, reason="the run was interrupted before it arrived"))
        self._arriving = {}
        return Interrupted()

    def stop(self, results: Results | None) -> None:
        """Tell all instances to stop and take in what they recorded, for a few seconds at most."""
        for rank in self._alive:
            self.messenger.send(rank, Stop())
        deadline = time.monotonic() + (INTERRUPTED_DEADLINE_S if self.interrupted else STOP_DEADLINE_S)
        while self._alive:
            match self.receive(deadline):
                case Bye(rank, sent_bytes):
                    self._alive.discard(rank)
                    self._sent_bytes[rank] = sent_bytes
                case PeerGone(rank=rank):
                    self._alive.discard(rank)
                case EventLines(lines) if results is not None:
                    results.add_events(lines)
                case None:
                    return


def fit_cost(measured: Sequence[Measured], chunk: int) -> PaddedCost:
    """Costs as the instances have just measured them. chunk: the most tokens that a prefill computes at once."""
    return PaddedCost(
        fit_prefill(padded_prefills([point for m in measured for point in m.prefill], chunk)),
        fit_step(padded_steps([point for m in measured for point in m.step])),
        fit_transfer([point for m in measured for point in m.transfer]),
        chunk=chunk,
    )


def _ssd_line(ready: Ready) -> str:
    line = f"its SSD tier has room for {ready.ssd_blocks} blocks and holds {len(ready.ssd_stored)}"
    if ready.ssd_foreign:
        line += f"; other models' take {ready.ssd_foreign / 2**20:.1f} MiB, which `mooncake-jax pool purge` frees"
    return line
