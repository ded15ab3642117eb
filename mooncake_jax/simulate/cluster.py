"""SimulatedCluster: the actors' Cluster in virtual time, with a cost model as the hardware (sched/serve.py).

Messages between actors take no time, but for Conductor's decision. Nothing is random. News of decoding steps comes in
bulk and may be late, but nobody decides anything before having heard of every step that has ended until then: before a
request arrives, and before an admission that asks again judges it, all decoding instances are caught up with; before a
decoding instance handles anything, it is itself.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from mooncake_jax.request import Outcome, Request
from mooncake_jax.sched.actions import (
    Action,
    DropKVCache,
    FetchBlocks,
    Later,
    LoadKVCache,
    PromoteBlocks,
    Report,
    RunPrefill,
    RunStep,
    Send,
    WriteBlocks,
)
from mooncake_jax.sched.cost import CostModel
from mooncake_jax.sched.messages import (
    CONDUCTOR,
    Arrived,
    Expired,
    KVCacheLoaded,
    Message,
    PrefillDone,
)
from mooncake_jax.simulate.config import SimulationConfig
from mooncake_jax.simulate.decoding_hardware import DecodingHardware
from mooncake_jax.simulate.events import Events
from mooncake_jax.simulate.network import Network
from mooncake_jax.simulate.prefill_hardware import PrefillHardware

_RATE_BYTES = 1 << 30  # what the cost model's rate of a transfer is taken from


class SimulatedCluster:
    """requests in order of their arrival; invalid: why some of them cannot be served, by id. ended: told of every
    outcome. judges_prefilled: whether the admission looks at the decoding pool when a prefill has ended.
    """

    def __init__(
        self,
        config: SimulationConfig,
        cost: CostModel,
        requests: Sequence[Request],
        invalid: Mapping[str, str],
        ended: Callable[[Outcome], None],
        judges_prefilled: bool = True,
    ):
        self._config, self._ended, self._judges_prefilled = config, ended, judges_prefilled
        self.events = Events()
        rates, latency = _network(config, cost)
        shared = "sharing" not in config.without and math.inf not in rates.values()
        self.network = Network(self.events, rates, latency, shared)
        self.decoding = {node: DecodingHardware(node, config, cost, self.events) for node in config.decoding_nodes}
        self.prefill = {
            node: PrefillHardware(node, config, cost, self.events, self.network, self._received)
            for node in config.prefill_nodes
        }
        self.unended = {request.id for request in requests}
        self.last_ended = 0.0
        self._arriving = [(r.arrival, Arrived(r, invalid.get(r.id))) for r in reversed(requests)]
        self._due: tuple[str, Message] | None = None  # once all that is to happen soon has happened
        self._perform: dict[type, Callable[[str, Action, float], None]] = {
            Send: self._send,
            Later: self._later,
            Report: self._report,
            RunPrefill: lambda node, action, now: self.prefill[node].run(action, now),
            FetchBlocks: lambda node, action, now: self.prefill[node].fetch(action, now),
            PromoteBlocks: lambda node, action, now: self.prefill[node].promote(action, now),
            WriteBlocks: lambda node, action, now: self.prefill[node].write(action, now),
            LoadKVCache: lambda node, action, now: self.decoding[node].load(action, now),
            RunStep: lambda node, action, now: self.decoding[node].run(action.batch, now),
            DropKVCache: lambda node, action, now: self.decoding[node].drop(action.dispatch),
        }

    # --- what happens

    def next_event(self) -> tuple[float, str, Message] | None:
        events = self.events
        while True:
            if events.soon:
                node, message = events.soon.popleft()
                return events.now, node, message
            if self._due is not None:
                (node, message), self._due = self._due, None
                return events.now, node, message
            if not self._advance():
                return None

    def _advance(self) -> bool:
        """To the next event; False if there is none."""
        events = self.events
        next_time = events.next_time
        if self._arriving and (next_time is None or self._arriving[-1][0] <= next_time):
            events.now, message = self._arriving.pop()
            self._due = CONDUCTOR, message
        elif next_time is None:
            return False
        else:
            self._due = events.advance()
        if self._due is not None:
            self._catch_up(*self._due)
        return True

    def _catch_up(self, node: str, message: Message) -> None:
        """Before this node handles this message."""
        now = self.events.now
        if (hardware := self.decoding.get(node)) is not None:
            hardware.catch_up(now)
            if type(message) is KVCacheLoaded:
                hardware.batch_changes()
        elif type(message) is Expired:
            if message.request_id not in self.unended:  # it would change nothing
                self._due = None
                return
            self._catch_up_all(now)
        elif node == CONDUCTOR:
            self._catch_up_all(now)

    def _catch_up_all(self, now: float) -> None:
        for hardware in self.decoding.values():
            hardware.catch_up(now)

    def _received(self, node: str, dispatch: int, request: Request, now: float) -> None:
        self.decoding[node].receive(dispatch, request, now)

    # --- what actors ask for

    def perform(self, node: str, action: Action, now: float) -> None:
        self._perform[type(action)](node, action, now)

    def _send(self, node: str, action: Send, now: float) -> None:
        to, message = action.to, action.message
        if to == CONDUCTOR:
            if self._judges_prefilled and type(message) is PrefillDone:
                self.events.post(now, to, message)
            else:
                self.events.soon.append((to, message))
        elif to in self.decoding:
            self.events.post(now, to, message)
        else:
            self.events.post(now + self._config.decision_s, to, message)

    def _later(self, node: str, action: Later, now: float) -> None:
        if action.seconds < math.inf:
            self.events.post(now + action.seconds, node, action.message)

    def _report(self, node: str, action: Report, now: float) -> None:
        self.unended.remove(action.outcome.id)
        self.last_ended = now
        self._ended(action.outcome)

    def check(self) -> None:
        """Assert the invariants."""
        self.network.check()
        for hardware in self.decoding.values():
            hardware.check()


def _network(config: SimulationConfig, cost: CostModel) -> tuple[dict[str, float], float]:
    """What each instance's NICs send a second, in bytes, and the latency of a transfer."""
    latency = cost.transfer(0)
    seconds = cost.transfer(_RATE_BYTES) - latency
    rate = config.link_bytes_per_s or (_RATE_BYTES / seconds if seconds else math.inf)
    rates = dict.fromkeys(config.prefill_nodes, rate * config.stages) | dict.fromkeys(config.decoding_nodes, rate)
    return rates, latency
