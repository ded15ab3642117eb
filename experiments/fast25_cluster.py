"""FAST25's end-to-end runs of Mooncake (figures 5, 11, 13 and 15), as far as the paper tells how they were made.

Nothing is rejected. KVCache leaves for the decoding instance once all is computed, and that of a reused prefix comes
from any of the nodes, which all lend memory to the pool: so figure 13's TTFT, which is what it is at full speed and its
transfer time, and so its slow networks are bearable.

ENGINE is what the paper does not tell and vLLM's engine does: prompts that wait are prefilled together, up to as many
tokens as docs/simulation.md has for vLLM. And a user sees the first token with the step that decodes the second: figure
15's TTFT grows again where decoding is slow.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from clusters import MODEL
from systems import with_prefill_factor, with_request_ms

from mooncake_jax.request import Outcome, Request
from mooncake_jax.sched.actions import Action
from mooncake_jax.sched.coupled import COUPLED_MODES
from mooncake_jax.sched.messages import CONDUCTOR, Message, StepsDecoded
from mooncake_jax.sched.profiles import profile
from mooncake_jax.sched.serve import Actor
from mooncake_jax.simulate.config import config_of
from mooncake_jax.simulate.run import Hosted, Run, simulate

NODES = 16
SERVING = {"admission": "none", "without": frozenset({"overlap"}), "prefix_senders": "any"}
ENGINE = {"batched_prefill": True, "token_budget": COUPLED_MODES["plain"].token_budget}


@dataclass(frozen=True)
class Setup:
    """profile: of the cost model; request_ms: what one more request adds to a decoding step, None: as the profile has
    it; prefill_factor: how many times longer prefills compute; first_step: whether TTFT ends with the first decoding
    step; kind: of its headline numbers, as the fidelity table has it; fields: of SimulationConfig, beside SERVING.
    """

    label: str
    profile: str
    kind: str
    fields: dict
    request_ms: float | None = None
    prefill_factor: float = 1.0
    first_step: bool = False

    def cost(self):
        cost = profile(self.profile)
        if self.request_ms is not None:
            cost = with_request_ms(cost, self.request_ms)
        return with_prefill_factor(cost, self.prefill_factor)

    def changed(self, **changes) -> "Setup":
        """With other values, of its own fields or of the simulation's."""
        own = {name: value for name, value in changes.items() if name in self.__dataclass_fields__}
        others = {name: value for name, value in changes.items() if name not in own}
        return replace(self, **own, fields=self.fields | others)


def faster(requests: Sequence[Request], speed: float) -> list[Request]:
    """Replayed so many times as fast."""
    return [replace(request, arrival=request.arrival / speed) for request in requests]


@dataclass(frozen=True)
class Served:
    """run: of the simulation; ttfts: seconds by request."""

    run: Run
    ttfts: dict[str, float]

    @property
    def outcomes(self) -> list[Outcome]:
        return self.run.outcomes

    @property
    def mean_ttft(self) -> float:
        return math.fsum(self.ttfts.values()) / len(self.ttfts)


def serve(requests: Sequence[Request], setup: Setup, host: Hosted = lambda node, actor: actor, **fields) -> Served:
    """fields: of SimulationConfig, before the set-up's own. host: as simulate() has it. Raises UsageError."""
    watched: list[_FirstSteps] = []

    def watching(node: str, actor: Actor) -> Actor:
        if node != CONDUCTOR or not setup.first_step:
            return host(node, actor)
        watched.append(_FirstSteps(actor, host(node, actor)))
        return watched[0]

    run = simulate(config_of(MODEL, **SERVING | fields | setup.fields), setup.cost(), requests, host=watching)
    ttfts = {outcome.id: outcome.ttft_s for outcome in run.outcomes if outcome.ttft_s is not None}
    if watched:
        arrivals = {outcome.id: outcome.arrival_s for outcome in run.outcomes}
        ttfts |= {name: ended - arrivals[name] for name, ended in watched[0].ended.items()}
    return Served(run, ttfts)


class _FirstSteps:
    """Conductor, and when the first decoding step of each request ended."""

    def __init__(self, conductor, hosted: Actor):
        self._conductor, self._hosted = conductor, hosted
        self.ended: dict[str, float] = {}

    def handle(self, message: Message, now: float) -> list[Action]:
        if type(message) is StepsDecoded:
            for dispatch in message.dispatches:
                attempt = self._conductor.attempts.get(dispatch)
                if attempt is not None:
                    self.ended.setdefault(attempt.request_id, message.times[0])
        return self._hosted.handle(message, now)
