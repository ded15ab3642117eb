"""Admissions that judge decoding before prefill: early rejection, without and with prediction (report 7.2 to 7.4).

The decoding load lags behind arrivals by a prefill. Judged as it is now, both pools' loads swing in anti-phase (report
7.3); so it is predicted for the time when the request's own prefill will be done.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping

from mooncake_jax.sched.admission import Admission, Limits
from mooncake_jax.sched.decisions import Dispatch, Reject
from mooncake_jax.sched.decoding_load import Assigned
from mooncake_jax.sched.output_lengths import OutputLengths
from mooncake_jax.sched.view import ClusterView, RequestView

RECENT = 256  # decoding times that t_d is the mean of


class EarlyRejection(Admission):
    """On arrival, by the larger of the prefill load and the decoding pool's present load (report 7.2).

    The pool's load is the mean over its instances, of the requests whose prefill has ended and this one.
    """

    def __init__(self):
        self._limits = Limits()

    def on_arrival(self, request: RequestView, dispatch: Dispatch, view: ClusterView, now: float) -> Reject | None:
        self._limits.arrived(request)
        late = self._limits.ttft(request, dispatch, view, now)
        if late is not None:
            return late
        then = now + dispatch.ttft
        contexts = {node: self._contexts(load.requests.values(), then) for node, load in view.decoding.items()}
        return self._limits.tbt(request, pool_tbt(request, dispatch.decoding, view, contexts), view)

    def _contexts(self, assigned: Iterable[Assigned], then: float) -> list[int]:
        """Of those requests that count; `then` is when the prefill of the one that is judged will be done."""
        return [other.context for other in assigned if other.prefilled]


class PredictedEarlyRejection(EarlyRejection):
    """By the decoding pool's load when the request's prefill will be done (report 7.4): with those whose prefill will
    be done by then, without those that will have been decoding for t_d. decoding_seconds: t_d; None learns it, as the
    mean of what has lately completed. Until something has, nobody leaves.
    """

    def __init__(self, decoding_seconds: float | None = None):
        super().__init__()
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._learns = decoding_seconds is None
        self.decoding_seconds = math.inf if decoding_seconds is None else decoding_seconds

    def on_completed(self, request: RequestView, output_tokens: int, decoding_seconds: float) -> None:
        if self._learns:
            self._recent.append(decoding_seconds)
            self.decoding_seconds = math.fsum(self._recent) / len(self._recent)

    def _contexts(self, assigned: Iterable[Assigned], then: float) -> list[int]:
        stays = self.decoding_seconds
        return [a.prompt_tokens + a.produced for a in assigned if a.ready <= then < a.ready + stays]


class RequestLevelPrediction(Admission):
    """Beyond the report: by the highest TBT that the chosen instance will have while the request decodes there, each
    request leaving when its own output is predicted to end.
    """

    def __init__(self):
        self._limits, self.lengths = Limits(), OutputLengths()

    def on_arrival(self, request: RequestView, dispatch: Dispatch, view: ClusterView, now: float) -> Reject | None:
        self._limits.arrived(request)
        late = self._limits.ttft(request, dispatch, view, now)
        if late is not None:
            return late
        others = view.decoding[dispatch.decoding].tightest_tbt
        return self._limits.tbt(request, self._highest_tbt(request, dispatch, view, now), view, others)

    def on_completed(self, request: RequestView, output_tokens: int, decoding_seconds: float) -> None:
        self.lengths.learn(request.prompt_tokens, output_tokens)

    def _highest_tbt(self, request: RequestView, dispatch: Dispatch, view: ClusterView, now: float) -> float:
        """TBT is highest when somebody joins: the request itself, or one whose prefill ends later."""
        joins = now + dispatch.ttft
        leaves = self._leaves(joins, request.prompt_tokens, 0, dispatch.tbt)
        stays = [
            (other.ready, self._leaves(max(now, other.ready), other.prompt_tokens, other.produced, dispatch.tbt), other)
            for other in view.decoding[dispatch.decoding].requests.values()
        ]
        highest = 0.0
        for moment in [joins, *(ready for ready, _, _ in stays if joins < ready < leaves)]:
            contexts = [other.context for ready, until, other in stays if ready <= moment < until]
            tbt = view.cost.step(len(contexts) + 1, sum(contexts) + request.prompt_tokens)
            highest = max(highest, tbt)
        return highest

    def _leaves(self, start: float, prompt_tokens: int, produced: int, tbt: float) -> float:
        """When an output ends that goes on from `start`."""
        remaining = self.lengths.remaining(prompt_tokens, produced)
        return math.inf if remaining is None else start + remaining * tbt


def pool_tbt(request: RequestView, decoding: str, view: ClusterView, contexts: Mapping[str, list[int]]) -> float:
    """Mean over the decoding instances of their predicted TBT in seconds, 0 where nobody is; the request at its own.
    contexts: tokens of those who count, by instance.
    """
    seconds = []
    for node, there in contexts.items():
        batch, context = len(there), sum(there)
        if node == decoding:
            batch, context = batch + 1, context + request.prompt_tokens
        seconds.append(view.cost.step(batch, context) if batch else 0.0)
    return math.fsum(seconds) / len(seconds)
