"""A cluster under more load than it can serve, by admission: what report figures 9 and 10 and table 3 share.

Loads are as report 7.1 has them: an instance's predicted TTFT, or TBT, over its SLO; here means over the pool's
instances. A Conductor is looked at every 15 s of its own clock, as the report does, before it handles what comes next.
Knows nothing of single figures.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from clusters import MODEL
from sampling import Sampled

from mooncake_jax.metrics import attained, mean
from mooncake_jax.request import REJECTED, SLO, Outcome, Request
from mooncake_jax.sched.cost import CostModel
from mooncake_jax.sched.messages import CONDUCTOR
from mooncake_jax.sched.profiles import profile
from mooncake_jax.sched.serve import Actor
from mooncake_jax.sched.view import ClusterView
from mooncake_jax.simulate.config import config_of
from mooncake_jax.simulate.run import simulate

TTFT_SLO, TBT_SLO = 30.0, 0.1
EVERY_S = 15.0
EARLY, PREDICTED = "early rejection", "with prediction"
ADMISSIONS = {"baseline": "baseline", EARLY: "early", PREDICTED: "early-predicted"}
# Loads swing where prefills wait about as long as decoding takes, so with a small prefill pool, and where decoding
# instances do not judge again as KVCache arrives: report figures 9 and 10.
SWINGING, SWINGING_SPEED = {"prefill": 4, "decode": 8, "recheck": False}, 1.5
FIRST_S = 120.0  # left out, while the queues fill


class Sample(NamedTuple):
    """Loads of both pools at a moment; 1 is what its SLO allows."""

    seconds: float
    prefill: float
    decoding: float


@dataclass(frozen=True)
class Overloaded:
    """A run, and samples of its loads while requests arrived."""

    outcomes: list[Outcome]
    samples: list[Sample]

    @property
    def rejected(self) -> int:
        return sum(outcome.status == REJECTED for outcome in self.outcomes)

    @property
    def wasted(self) -> int:
        """Rejected ones that had been prefilled."""
        return sum(outcome.status == REJECTED and outcome.reused_tokens is not None for outcome in self.outcomes)

    @property
    def steady(self) -> list[Sample]:
        """Once the queues have filled."""
        return [sample for sample in self.samples if sample.seconds >= FIRST_S] or self.samples

    def good(self, tbt: str = "tbt_top10_s", limit: float = TBT_SLO) -> int:
        """Requests that completed within both SLOs. tbt: what of a request is held to the limit."""
        within = (attained(outcome, SLO(TTFT_SLO, math.inf)) for outcome in self.outcomes)
        tbts = (getattr(outcome, tbt) or 0.0 for outcome in self.outcomes)
        return sum(ok and seconds <= limit for ok, seconds in zip(within, tbts, strict=True))


def serve(requests: Sequence[Request], admission: str, cost: str | CostModel, **fields: Any) -> Overloaded:
    """admission: of ADMISSIONS; cost: a profile by name, or a cost model; fields: of SimulationConfig."""
    last, watched = max(request.arrival for request in requests), []
    slos = {"ttft_slo": TTFT_SLO, "tbt_slo": TBT_SLO}
    config = config_of(MODEL, admission=ADMISSIONS[admission], **slos | fields)

    def host(node: str, actor: Any) -> Actor:
        if node == CONDUCTOR:
            watched.append(actor := Sampled(actor, EVERY_S, _loads))
        return actor

    hardware = profile(cost) if isinstance(cost, str) else cost
    outcomes = simulate(config, hardware, requests, host=host).outcomes
    return Overloaded(outcomes, [sample for sample in watched[0].samples if sample.seconds <= last])


def _loads(view: ClusterView, now: float) -> Sample:
    queues = [queue.seconds(now) for queue in view.prefill.values()]
    tbts = []
    for load in view.decoding.values():
        contexts = [request.context for request in load.requests.values() if request.prefilled]
        tbts.append(view.cost.step(len(contexts), sum(contexts)) if contexts else 0.0)
    return Sample(now, mean(queues) / TTFT_SLO, mean(tbts) / TBT_SLO)
