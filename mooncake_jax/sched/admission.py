"""Admission: which requests are served at all (report 7), and the simple ones. Those that predict are in
predicted_admission.py.

Conductor asks when a request arrives and a policy has chosen its instances, and again when its prefill has ended. The
load of an instance is what is predicted, TTFT or TBT, over the SLO (report 7.1): above 1 the request is rejected, with
the estimate that says so. A request's own SLOs count where it names any, and the tightest TBT SLO of those that it
would decode with. Lower priorities are rejected first (priorities.py). An admission may keep state of its own, and
knows no output lengths.
"""

import math
from typing import Protocol

from mooncake_jax.sched.decisions import Dispatch, Reject
from mooncake_jax.sched.priorities import Demand
from mooncake_jax.sched.view import ClusterView, RequestView


class Admission(Protocol):
    """What --admission names. A class of yours that inherits from it need only say what differs from serving all."""

    def on_arrival(self, request: RequestView, dispatch: Dispatch, view: ClusterView, now: float) -> Reject | None:
        """The policy has chosen `dispatch`; nothing of it is in the view yet."""
        return None

    def on_prefilled(self, request: RequestView, decoding: str, view: ClusterView, now: float) -> Reject | None:
        """Its prefill has ended, and it counts among those that decode; a rejection now wastes the prefill. With
        elastic roles `decoding` may take no new requests any more: view.load() has its load in any case.
        """
        return None

    def on_completed(self, request: RequestView, output_tokens: int, decoding_seconds: float) -> None:
        """It has ended well: so much output in so much time from the first token to the last."""


class NoAdmission(Admission):
    """Serves every request."""


class Limits:
    """SLOs as a request of some priority meets them."""

    def __init__(self):
        self._demand = Demand()

    def arrived(self, request: RequestView) -> None:
        self._demand.arrived(request)

    def ttft(self, request: RequestView, dispatch: Dispatch, view: ClusterView, now: float) -> Reject | None:
        """Why this TTFT is too long."""
        queued = 0.0 if dispatch.inlined else view.prefill[dispatch.prefill].seconds(now)
        felt = dispatch.ttft + (self._demand.felt(request, queued) - queued)
        return _above("TTFT", felt, view.slo_of(request).ttft, felt > dispatch.ttft, request)

    def tbt(self, request: RequestView, predicted: float, view: ClusterView, others: float = math.inf) -> Reject | None:
        """Why this TBT is too long. others: the tightest TBT SLO of those it decodes with."""
        shared = max(0.0, predicted - view.cost.step(1, request.prompt_tokens))
        felt = predicted + (self._demand.felt(request, shared) - shared)
        return _above("TBT", felt, min(view.slo_of(request).tbt, others), felt > predicted, request)


def _above(name: str, seconds: float, limit: float, delayed: bool, request: RequestView) -> Reject | None:
    if not seconds > limit:
        return None
    behind = f" for priority {request.priority}" if delayed else ""
    return Reject(f"predicted {name}{behind} is above the SLO", seconds, limit)


class SLOCheck(Admission):
    """The last lines of algorithm 1: on arrival, by the estimates that the choice of instances was made by. Requests
    still in prefill count at the decoding instance.
    """

    def __init__(self):
        self._limits = Limits()

    def on_arrival(self, request: RequestView, dispatch: Dispatch, view: ClusterView, now: float) -> Reject | None:
        self._limits.arrived(request)
        others = view.decoding[dispatch.decoding].tightest_tbt
        return self._limits.ttft(request, dispatch, view, now) or self._limits.tbt(request, dispatch.tbt, view, others)


class Baseline(Admission):
    """Report 7.2's starting point: the prefill load on arrival, the decoding load once the prefill is done, which is
    then wasted.
    """

    def __init__(self):
        self._limits = Limits()

    def on_arrival(self, request: RequestView, dispatch: Dispatch, view: ClusterView, now: float) -> Reject | None:
        self._limits.arrived(request)
        return self._limits.ttft(request, dispatch, view, now)

    def on_prefilled(self, request: RequestView, decoding: str, view: ClusterView, now: float) -> Reject | None:
        load = view.load(decoding)
        contexts = [other.context for other in load.requests.values() if other.prefilled]
        return self._limits.tbt(request, view.cost.step(len(contexts), sum(contexts)), view, load.tightest_tbt)
