"""DecodingLoad: Conductor's belief of what a decoding instance has to do (report 6.1 and 7.4).

A request counts from its dispatch on, before its KVCache has arrived: else all that arrive during one prefill would go
to the same instance. Knows nothing of output lengths.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_jax.sched.pace import Pace


@dataclass(slots=True)
class Assigned:
    """A request that decodes at an instance, or will. Times in seconds on the common clock."""

    prompt_tokens: int
    ready: float  # when its prefill ends; predicted until it has
    tbt_slo: float = math.inf
    prefilled: bool = False
    first_token: float | None = None  # when it came
    produced: int = 0  # tokens of output

    @property
    def context(self) -> int:
        """Tokens of KVCache."""
        return self.prompt_tokens + self.produced


class DecodingLoad:
    """requests by dispatch number; context: tokens of all their KVCache together; tightest_tbt: the least of their TBT
    SLOs, seconds; inlining: of those whose prefill is inlined here and has not ended, the seconds that it takes the
    device by the cost model; inline_pace: how many times longer it does.
    """

    __slots__ = ("context", "inline_pace", "inlining", "requests", "tightest_tbt")

    def __init__(self):
        self.requests: dict[int, Assigned] = {}
        self.context = 0
        self.tightest_tbt = math.inf
        self.inlining: dict[int, float] = {}
        self.inline_pace = Pace()

    def add(self, dispatch: int, prompt_tokens: int, ready: float, tbt_slo: float = math.inf) -> None:
        """A request is dispatched, and its prefill is predicted to end at `ready`."""
        self.requests[dispatch] = Assigned(prompt_tokens, ready, tbt_slo)
        self.context += prompt_tokens
        self.tightest_tbt = min(self.tightest_tbt, tbt_slo)

    def inline(self, dispatch: int, seconds: float) -> None:
        """Its prefill is to be inlined here, and takes so long by the cost model."""
        self.inlining[dispatch] = seconds

    def inlined(self, dispatch: int, seconds: float) -> None:
        """It took so long, which teaches how long others will."""
        estimated = self.inlining.pop(dispatch, None)
        if estimated is not None:
            self.inline_pace.learn(estimated, seconds)

    def expect(self, dispatch: int, ready: float) -> None:
        """Its prefill is now predicted to end then."""
        if dispatch in self.requests:
            self.requests[dispatch].ready = ready

    def prefilled(self, dispatch: int, now: float) -> None:
        """Its prefill has ended: it decodes from now on."""
        if dispatch in self.requests:
            self.requests[dispatch].ready = now
            self.requests[dispatch].prefilled = True

    def tokens(self, dispatches: Sequence[int], at: float, count: int = 1) -> None:
        """Each of them got a token of output at that time, or so many from then on."""
        here = [request for request in map(self.requests.get, dispatches) if request is not None]
        for request in here:
            if request.first_token is None:
                request.first_token = at
            request.produced += count
        self.context += count * len(here)

    def remove(self, dispatch: int) -> None:
        """It has ended, however."""
        request = self.requests.pop(dispatch, None)
        if request is None:
            return
        self.inlining.pop(dispatch, None)
        self.context -= request.context
        if request.tbt_slo == self.tightest_tbt:
            self.tightest_tbt = min([r.tbt_slo for r in self.requests.values()], default=math.inf)

    def check(self) -> None:
        """Assert the invariants."""
        contexts = sum(request.context for request in self.requests.values())
        assert self.context == contexts >= 0, f"{contexts} context tokens are counted as {self.context}"
        limits = [request.tbt_slo for request in self.requests.values()]
        assert self.tightest_tbt == min(limits, default=math.inf), "the tightest TBT SLO is another"
        assert self.inlining.keys() <= self.requests.keys(), "a prefill is inlined for nobody"
