"""SimulatedCluster: the actors' Cluster in virtual time, with a cost model as the hardware (sched/serve.py).

Messages between actors take no time, but for Conductor's decision. News of decoding steps comes in bulk and may be
late, but nobody decides anything before having heard of every step that has ended until then: before a request arrives,
and before an admission that asks again judges it, all decoding instances are caught up with; before a decoding instance
handles anything, it is itself. Where prefills are inlined, whatever it handles may make it want its device for one
after the step under way.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mooncake_jax.request import Outcome, Request
from mooncake_jax.sched.actions import (
    Action,
    DropKVCache,
    FetchBlocks,
    InlinePrefill,
    Later,
    LoadKVCache,
    PromoteBlocks,
    Report,
    RunIteration,
    RunPrefill,
    RunPrefillBatch,
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
    PrefillInlined,
    ReviewRoles,
    StepDone,
)
from mooncake_jax.simulate.config import SimulationConfig
from mooncake_jax.simulate.cores import Cores
from mooncake_jax.simulate.coupled_hardware import CoupledHardware
from mooncake_jax.simulate.decoding_hardware import DecodingHardware
from mooncake_jax.simulate.events import Events
from mooncake_jax.simulate.network import Network
from mooncake_jax.simulate.one_machine import SharingDecodingHardware, SharingPrefillHardware
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
        rates, receiving, latency = _network(config, cost)
        shared = "sharing" not in config.without and math.inf not in rates.values()
        self.network = Network(self.events, rates, latency, shared, receiving)
        self.cores = None if config.cores is None else Cores(self.events, config.cores)
        decoding, prefill = DecodingHardware, PrefillHardware
        if self.cores is not None:
            decoding = partial(SharingDecodingHardware, self.cores)
            prefill = partial(SharingPrefillHardware, self.cores)
        self.coupled = {node: CoupledHardware(node, config, cost, self.events) for node in config.coupled_nodes}
        self.decoding: Mapping[str, DecodingHardware] = self.coupled or {
            node: decoding(node, config, cost, self.events) for node in config.may_decode
        }
        self.prefill = {
            node: prefill(node, config, cost, self.events, self.network, self._received)
            for node in config.prefill_nodes
            if node not in self.coupled
        }
        self.unended = {request.id for request in requests}
        self.last_ended = 0.0
        self._arriving = [(r, Arrived(r, invalid.get(r.id))) for r in reversed(requests)]
        self._await_next()
        self._due: tuple[str, Message] | None = None  # once all that is to happen soon has happened
        self._do = self._performers()
        self._catch_up: dict[str, Callable[[Message, float], bool]] = {CONDUCTOR: self._before_conductor}
        for node, hardware in self.decoding.items():
            self._catch_up[node] = partial(self._before_decoding, hardware)
        for node, hardware in self.coupled.items():
            self._catch_up[node] = partial(self._before_coupled, hardware)

    def _performers(self) -> dict[str, dict[type, Callable[[Any, float], None]]]:
        """By node and kind of action."""
        conductor = {Send: self._order, Later: self._later, Report: self._report}
        prefill = {
            node: {
                Send: self._tell_conductor,
                RunPrefill: hardware.run,
                RunPrefillBatch: hardware.run_batch,
                FetchBlocks: hardware.fetch,
                PromoteBlocks: hardware.promote,
                WriteBlocks: hardware.write,
            }
            for node, hardware in self.prefill.items()
        }
        if self.coupled:
            return {CONDUCTOR: conductor, **{node: self._coupled(hardware) for node, hardware in self.coupled.items()}}
        decoding = {
            node: {
                Send: self._tell_at_once,
                LoadKVCache: hardware.load,
                InlinePrefill: hardware.prefill,
                RunStep: hardware.run,
                DropKVCache: hardware.drop,
            }
            for node, hardware in self.decoding.items()
        }
        elastic = {node: decoding[node] | prefill[node] for node in prefill if node in decoding}  # Send is prefill's
        return {CONDUCTOR: conductor, **prefill, **decoding, **elastic}

    def _coupled(self, hardware: CoupledHardware) -> dict[type, Callable[[Any, float], None]]:
        return {
            Send: self._tell_at_once,
            RunIteration: hardware.iterate,
            RunStep: hardware.run,
            DropKVCache: hardware.drop,
        }

    # --- what happens

    def next_event(self) -> tuple[float, str, Message] | None:
        events, soon = self.events, self.events.soon
        while not soon:
            event, self._due = self._due, None
            if event is None:
                event = events.advance()
                if event is None:
                    if soon:
                        break
                    return None
                catch_up = self._catch_up.get(event[0])
                if catch_up is not None and not catch_up(event[1], events.now):
                    continue
                if soon:
                    self._due = event
                    break
            node, message = event
            return events.now, node, message
        node, message = soon.popleft()
        return events.now, node, message

    def _before_conductor(self, message: Message, now: float) -> bool:
        """Catch up with what it is going to decide by; False if it need not handle the message."""
        if type(message) is Arrived:
            self._await_next()
        elif type(message) is Expired and message.request_id not in self.unended:  # it would change nothing
            return False
        elif (
            type(message) is ReviewRoles and self.events.over
        ):  # or a run in which nothing happens would go on for ever
            return False
        for hardware in self.decoding.values():
            hardware.catch_up(now)
        return True

    def _before_decoding(self, hardware: DecodingHardware, message: Message, now: float) -> bool:
        inline = self._config.inline_prefill
        if type(message) is PrefillInlined:  # which has Conductor decide, if its admission asks again
            for other in self.decoding.values():
                other.catch_up(now)
        elif inline or type(message) is not KVCacheLoaded:
            hardware.catch_up(now)
        if inline or type(message) is KVCacheLoaded:
            hardware.batch_changes(now)
        return True

    def _before_coupled(self, hardware: CoupledHardware, message: Message, now: float) -> bool:
        """What is not of its own doing takes effect after the step under way, and nothing is to be told of that
        before. An iteration may have ended a prefill, which Conductor judges by what all have decoded.
        """
        if type(message) is not StepDone:
            hardware.catch_up(now)
            hardware.batch_changes(now)
        elif self._judges_prefilled:
            for other in self.coupled.values():
                other.catch_up(now)
        return True

    def _await_next(self) -> None:
        if self._arriving:
            request, message = self._arriving.pop()
            self.events.post(request.arrival, CONDUCTOR, message)

    def _received(self, node: str, dispatch: int, request: Request, now: float) -> None:
        self.decoding[node].receive(dispatch, request, now)

    # --- what actors ask for

    def perform(self, node: str, action: Action, now: float) -> None:
        self._do[node][type(action)](action, now)

    def _tell_conductor(self, action: Send, now: float) -> None:
        if self._judges_prefilled and type(action.message) is PrefillDone:
            self.events.post(now, CONDUCTOR, action.message)  # after having caught up with all
        else:
            self._tell_at_once(action, now)

    def _tell_at_once(self, action: Send, now: float) -> None:
        self.events.soon.append((CONDUCTOR, action.message))

    def _order(self, action: Send, now: float) -> None:
        """What Conductor wants of an instance. None overtakes the StartPrefill that it is about."""
        prefills = action.to in self.prefill or action.to in self.coupled or self._config.inline_prefill
        delay = self._config.decision_s if prefills else 0.0
        self.events.post(now + delay, action.to, action.message)

    def _later(self, action: Later, now: float) -> None:
        if action.seconds < math.inf:
            self.events.post(now + action.seconds, CONDUCTOR, action.message)

    def _report(self, action: Report, now: float) -> None:
        self.unended.remove(action.outcome.id)
        self.last_ended = now
        self._ended(action.outcome)

    def check(self) -> None:
        """Assert the invariants."""
        self.network.check()
        if self.cores is not None:
            self.cores.check()
        for hardware in self.decoding.values():
            hardware.check()


def _network(config: SimulationConfig, cost: CostModel) -> tuple[dict[str, float], dict[str, float] | None, float]:
    """What each instance's NICs send a second, and receive (None: as much), in bytes; and the latency of a transfer."""
    latency = cost.transfer(0)
    seconds = cost.transfer(_RATE_BYTES) - latency
    rate = config.link_bytes_per_s or (_RATE_BYTES / seconds if seconds else math.inf)
    received = config.receive_bytes_per_s
    return _by_node(config, rate), None if received is None else _by_node(config, received), latency


def _by_node(config: SimulationConfig, rate: float) -> dict[str, float]:
    """Of a NIC a node: a pipeline has as many as stages."""
    return dict.fromkeys(config.prefill_nodes, rate * config.stages) | dict.fromkeys(config.decoding_nodes, rate)
