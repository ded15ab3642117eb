"""DecodingInstance: the local scheduler of a decoding instance, continuous batching (report 3, step 4).

Requests whose KVCache has arrived are loaded to device memory first come first served while the others decode, and
join the next batch. Memory for the whole output is set aside on joining, so that no running request is ever evicted.

Conductor chose this instance before the prefill, and its load may have changed since: as the KVCache arrives TBT is
judged again, by what is really here, and a request that would break a TBT SLO is rejected (report 3 and 7).
"""

import math
from dataclasses import dataclass
from typing import Protocol

from mooncake_jax.request import Request
from mooncake_jax.sched.actions import Action, DropKVCache, LoadKVCache, RunStep, Send
from mooncake_jax.sched.messages import (
    CONDUCTOR,
    Cancel,
    DecodingFailed,
    DecodingRejected,
    KVCacheLoaded,
    KVCacheReceived,
    Message,
    StepDone,
    StepFailed,
    StepsDecoded,
    StepsDone,
    Token,
    TokensDecoded,
)


@dataclass(frozen=True, slots=True)
class DecodingLimits:
    """max_batch requests at once; pages of page_size tokens in device memory; ids that end a request; tbt_slo in
    seconds, of requests that name none.
    """

    max_batch: int
    pages: int
    page_size: int
    stop_ids: frozenset[int] = frozenset()
    tbt_slo: float = math.inf

    def pages_for(self, request: Request) -> int:
        return -(-(request.prompt_tokens + request.output_length) // self.page_size)

    def tbt_slo_of(self, request: Request) -> float:
        return self.tbt_slo if request.tbt_slo is None else request.tbt_slo


class StepCost(Protocol):
    """The part of a CostModel that this instance believes of itself."""

    def step(self, batch: int, context: int) -> float: ...


@dataclass(slots=True)
class _Joined:
    received: KVCacheReceived
    pages: int
    produced: int = 0


class DecodingInstance:
    """cost: of its own steps, to judge TBT by as KVCache arrives; None: whatever arrives is decoded."""

    def __init__(self, name: str, limits: DecodingLimits, cost: StepCost | None = None):
        self.name, self.limits, self.cost = name, limits, cost
        self.waiting: list[KVCacheReceived] = []
        self.loading: dict[int, _Joined] = {}
        self.batch: dict[int, _Joined] = {}
        self.stepping = False

    def handle(self, message: Message, now: float) -> list[Action]:
        match message:
            case KVCacheReceived():
                actions = self._receive(message)
            case KVCacheLoaded(dispatch, stopped):
                actions = self._join(dispatch, stopped, now)
            case StepDone():
                self.stepping = False
                actions = self._deliver(message, now)
            case StepsDone():
                self.stepping = False
                actions = self._deliver_steps(message)
            case StepFailed(reason):
                self.stepping = False
                actions = [a for dispatch in list(self.batch) for a in self._fail(dispatch, reason)]
            case DecodingFailed(dispatch, _, reason):
                actions = self._fail(dispatch, reason)
            case Cancel(dispatch):
                actions = self._cancel(dispatch)
            case _:
                raise TypeError(f"{self.name} cannot handle {type(message).__name__}")
        return actions + self._load_waiting() + self._step()

    def _receive(self, received: KVCacheReceived) -> list[Action]:
        needed = self.limits.pages_for(received.request)
        if needed > self.limits.pages:  # it would wait for ever, and all behind it
            reason = f"needs {needed} pages, of which there are {self.limits.pages}"
            failed = DecodingFailed(received.dispatch, self.name, reason)
            return [DropKVCache(received.dispatch), Send(CONDUCTOR, failed)]
        if (rejected := self._breaks_slo(received)) is not None:
            return [DropKVCache(received.dispatch), Send(CONDUCTOR, rejected)]
        self.waiting.append(received)
        return []

    def _breaks_slo(self, received: KVCacheReceived) -> DecodingRejected | None:
        """Why it may not join those that are here, who keep their SLOs too."""
        if self.cost is None:
            return None
        here = [(j.received.request, j.produced) for j in (*self.batch.values(), *self.loading.values())]
        here += [(waiting.request, 0) for waiting in (*self.waiting, received)]
        together = here[-self.limits.max_batch :]  # the first to come are the first to leave
        limit = min([self.limits.tbt_slo_of(request) for request, _ in together])
        if limit == math.inf:
            return None
        tbt = self.cost.step(len(together), sum([request.prompt_tokens + produced for request, produced in together]))
        if not tbt > limit:
            return None
        reason = "predicted TBT is above the SLO as its KVCache arrives"
        return DecodingRejected(received.dispatch, self.name, reason, tbt, limit)

    def _load_waiting(self) -> list[Action]:
        actions = []
        while self.waiting and len(self.batch) + len(self.loading) < self.limits.max_batch:
            head = self.waiting[0]
            pages = self.limits.pages_for(head.request)
            if self._pages_used() + pages > self.limits.pages:
                break
            del self.waiting[0]
            self.loading[head.dispatch] = _Joined(head, pages)
            actions.append(LoadKVCache(head.dispatch, head.request, head.first_token))
        return actions

    def _pages_used(self) -> int:
        return sum([joined.pages for joined in (*self.batch.values(), *self.loading.values())])

    def _join(self, dispatch: int, stopped: bool, now: float) -> list[Action]:
        """The first token, which prefill has sampled, is handed out as if a step had made it."""
        joined = self.loading.pop(dispatch, None)
        if joined is None:  # cancelled meanwhile
            return []
        self.batch[dispatch] = joined
        first, known = joined.received.first_token, joined.received.logprobs
        logprobs = ((dispatch, known),) if known is not None else ()
        return self._deliver(StepDone(((dispatch, first),), 0.0, (dispatch,) * stopped, logprobs), now)

    def _deliver(self, step: StepDone, now: float) -> list[Action]:
        """Hand out one token for each request; those that are done leave the batch."""
        delivered, leaving, logprobs = [], [], dict(step.logprobs)
        for dispatch, token_id in step.tokens:
            joined = self.batch.get(dispatch)
            if joined is None:  # cancelled meanwhile
                continue
            joined.produced += 1
            last = dispatch in step.stopped or self._is_last(joined, token_id)
            delivered.append(Token(dispatch, token_id, last, logprobs.get(dispatch)))
            if last:
                del self.batch[dispatch]
                leaving.append(DropKVCache(dispatch))
        if not delivered:
            return leaving
        return [*leaving, Send(CONDUCTOR, TokensDecoded(self.name, now, tuple(delivered)))]

    def _deliver_steps(self, steps: StepsDone) -> list[Action]:
        """What _deliver() would do for each of them."""
        delivered, ended, count = [], [], len(steps.ends)
        for dispatch in steps.batch:
            joined = self.batch.get(dispatch)
            if joined is None:  # cancelled meanwhile
                continue
            joined.produced += count
            delivered.append(dispatch)
            if joined.produced >= joined.received.request.output_length:
                del self.batch[dispatch]
                ended.append(dispatch)
        if not delivered:
            return []
        news = StepsDecoded(self.name, steps.ends, tuple(delivered), tuple(ended))
        return [*map(DropKVCache, ended), Send(CONDUCTOR, news)]

    def _is_last(self, joined: _Joined, token_id: int | None) -> bool:
        request = joined.received.request
        end_of_text = token_id in self.limits.stop_ids and not request.ignore_eos
        return end_of_text or token_id in request.stop_ids or joined.produced >= request.output_length

    def _step(self) -> list[Action]:
        if self.stepping or not self.batch:
            return []
        self.stepping = True
        return [RunStep(tuple(self.batch))]

    def _fail(self, dispatch: int, reason: str) -> list[Action]:
        if self.batch.pop(dispatch, None) is None and self.loading.pop(dispatch, None) is None:
            return []
        return [DropKVCache(dispatch), Send(CONDUCTOR, DecodingFailed(dispatch, self.name, reason))]

    def _cancel(self, dispatch: int) -> list[Action]:
        self.waiting = [w for w in self.waiting if w.dispatch != dispatch]
        self.loading.pop(dispatch, None)
        self.batch.pop(dispatch, None)
        return [DropKVCache(dispatch)]

    def check(self) -> None:
        """Assert the invariants."""
        assert self._pages_used() <= self.limits.pages, (
            f"{self.name}: {self._pages_used()} pages of {self.limits.pages} in use"
        )
        assert len(self.batch) + len(self.loading) <= self.limits.max_batch, f"{self.name}: batch is over its maximum"
        assert not set(self.batch) & set(self.loading), f"{self.name}: a request is loading and decoding"
