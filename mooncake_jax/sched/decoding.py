"""DecodingInstance: the local scheduler of a decoding instance, continuous batching (report 3, step 4).

Requests whose KVCache has arrived are loaded to device memory first come first served while the others decode, and
join the next batch. Memory for the whole output is set aside on joining, so that no running request is ever evicted.

Conductor chose this instance before the prefill, and its load may have changed since: as the KVCache arrives TBT is
judged again, by what is really here, and a request that would break a TBT SLO is rejected (report 3 and 7).

A request whose prefill is inlined (inline.py) waits with the others for its place in device memory, and then for the
device: between two steps at most one prompt is computed.
"""

import math
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from mooncake_jax.request import TokenLogprobs
from mooncake_jax.sched.actions import Action, DropKVCache, InlinePrefill, LoadKVCache, RunStep, Send
from mooncake_jax.sched.batching import ContinuousBatching, DecodingLimits, Running
from mooncake_jax.sched.messages import (
    CONDUCTOR,
    Cancel,
    DecodingFailed,
    DecodingRejected,
    KVCacheLoaded,
    KVCacheReceived,
    Message,
    PrefillDone,
    PrefillFailed,
    PrefillInlined,
    PrefillStarted,
    StartPrefill,
    StepDone,
    StepFailed,
    StepsDone,
)


class StepCost(Protocol):
    """The part of a CostModel that this instance believes of itself."""

    def step(self, batch: int, context: int) -> float: ...


@dataclass(slots=True, kw_only=True)
class _Joined(Running):
    pages: int
    first_token: int | None = None
    logprobs: TokenLogprobs | None = None  # of the first token


Coming: TypeAlias = KVCacheReceived | StartPrefill


class DecodingInstance(ContinuousBatching):
    """cost: of its own steps, to judge TBT by as KVCache arrives; None: whatever arrives is decoded.

    waiting: for a place in device memory; loading: have it, and are not in the batch yet; to_inline: those of them that
    wait for the device, which `inlining` has.
    """

    def __init__(self, name: str, limits: DecodingLimits, cost: StepCost | None = None):
        super().__init__(name, limits)
        self.cost = cost
        self.waiting: list[Coming] = []
        self.loading: dict[int, _Joined] = {}
        self.to_inline: list[int] = []
        self.inlining: int | None = None
        self.batch: dict[int, _Joined]
        self._step_due = False  # a prompt was computed since the last one

    def handle(self, message: Message, now: float) -> list[Action]:
        match message:
            case StepsDone():
                actions = self._deliver_steps(message)
                if message.more:  # so none has ended
                    return actions
                self.stepping = False
            case KVCacheReceived() | StartPrefill():
                actions = self._receive(message)
            case KVCacheLoaded(dispatch, stopped):
                actions = self._join(dispatch, stopped, now)
            case PrefillInlined():
                actions = self._inlined(message, now)
            case PrefillFailed():
                actions = self._not_inlined(message)
            case StepDone():
                self.stepping = False
                actions = self._deliver(message, now)
            case StepFailed(reason):
                self.stepping = False
                actions = [a for dispatch in list(self.batch) for a in self._fail(dispatch, reason)]
            case DecodingFailed(dispatch, _, reason):
                actions = self._fail(dispatch, reason)
            case Cancel(dispatch):
                actions = self._cancel(dispatch)
            case _:
                raise TypeError(f"{self.name} cannot handle {type(message).__name__}")
        return actions + self._take_in_waiting() + self._use_device()

    def _receive(self, coming: Coming) -> list[Action]:
        needed = self.limits.pages_for(coming.request)
        if needed > self.limits.pages:  # it would wait for ever, and all behind it
            reason = f"needs {needed} pages, of which there are {self.limits.pages}"
            return self._refuse(coming, DecodingFailed(coming.dispatch, self.name, reason))
        if (rejected := self._breaks_slo(coming)) is not None:
            return self._refuse(coming, rejected)
        self.waiting.append(coming)
        return []

    def _refuse(self, coming: Coming, told: DecodingFailed | DecodingRejected) -> list[Action]:
        if isinstance(coming, StartPrefill):
            return [Send(CONDUCTOR, told), Send(CONDUCTOR, PrefillFailed(coming.dispatch, self.name, told.reason))]
        return [DropKVCache(coming.dispatch), Send(CONDUCTOR, told)]

    def _breaks_slo(self, coming: Coming) -> DecodingRejected | None:
        """Why it may not join those that are here, who keep their SLOs too."""
        if self.cost is None:
            return None
        here = [(j.request, j.produced) for j in (*self.batch.values(), *self.loading.values())]
        here += [(waiting.request, 0) for waiting in (*self.waiting, coming)]
        together = here[-self.limits.max_batch :]  # the first to come are the first to leave
        limit = min([self.limits.tbt_slo_of(request) for request, _ in together])
        if limit == math.inf:
            return None
        tbt = self.cost.step(len(together), sum([request.prompt_tokens + produced for request, produced in together]))
        if not tbt > limit:
            return None
        reason = "predicted TBT is above the SLO as its KVCache arrives"
        return DecodingRejected(coming.dispatch, self.name, reason, tbt, limit)

    def _take_in_waiting(self) -> list[Action]:
        actions = []
        while self.waiting and len(self.batch) + len(self.loading) < self.limits.max_batch:
            head = self.waiting[0]
            pages = self.limits.pages_for(head.request)
            if self._pages_used() + pages > self.limits.pages:
                break
            del self.waiting[0]
            self.loading[head.dispatch] = joined = _Joined(request=head.request, pages=pages)
            if isinstance(head, StartPrefill):
                self.to_inline.append(head.dispatch)
                continue
            joined.first_token, joined.logprobs = head.first_token, head.logprobs
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
        logprobs = ((dispatch, joined.logprobs),) if joined.logprobs is not None else ()
        return self._deliver(StepDone(((dispatch, joined.first_token),), 0.0, (dispatch,) * stopped, logprobs), now)

    def _inlined(self, done: PrefillInlined, now: float) -> list[Action]:
        self.inlining, self._step_due = None, True
        dispatch, joined = done.dispatch, self.loading.get(done.dispatch)
        if joined is not None:
            joined.first_token, joined.logprobs = done.first_token, done.logprobs
        ended = PrefillDone(dispatch, self.name, 0, done.seconds, (), top_logits=done.top_logits)
        return [Send(CONDUCTOR, ended), *self._join(dispatch, done.stopped, now)]

    def _not_inlined(self, failed: PrefillFailed) -> list[Action]:
        self.inlining = None
        self.loading.pop(failed.dispatch, None)
        return [Send(CONDUCTOR, failed)]

    def _use_device(self) -> list[Action]:
        """For the next step, or for a prompt if there was a step since the last one, or nobody to make one for."""
        if self.stepping or self.inlining is not None:
            return []
        if self.to_inline and not (self._step_due and self.batch):
            self.inlining = dispatch = self.to_inline.pop(0)
            started = PrefillStarted(dispatch, self.name, 0)
            return [Send(CONDUCTOR, started), InlinePrefill(dispatch, self.loading[dispatch].request)]
        if not self.batch:
            return []
        self.stepping, self._step_due = True, False
        return [RunStep(tuple(self.batch), yields=bool(self.to_inline))]

    def _fail(self, dispatch: int, reason: str) -> list[Action]:
        if self.batch.pop(dispatch, None) is None and self.loading.pop(dispatch, None) is None:
            return []
        return [DropKVCache(dispatch), Send(CONDUCTOR, DecodingFailed(dispatch, self.name, reason))]

    def _cancel(self, dispatch: int) -> list[Action]:
        """A prompt that is being computed is left to its end."""
        given_up = dispatch in self.to_inline
        for waiting in [waiting for waiting in self.waiting if waiting.dispatch == dispatch]:
            self.waiting.remove(waiting)
            given_up = isinstance(waiting, StartPrefill)
        self.to_inline = [d for d in self.to_inline if d != dispatch]
        self.loading.pop(dispatch, None)
        self.batch.pop(dispatch, None)
        if given_up:
            return [Send(CONDUCTOR, PrefillFailed(dispatch, self.name, "cancelled"))]
        return [DropKVCache(dispatch)]

    def check(self) -> None:
        """Assert the invariants."""
        assert self._pages_used() <= self.limits.pages, (
            f"{self.name}: {self._pages_used()} pages of {self.limits.pages} in use"
        )
        assert len(self.batch) + len(self.loading) <= self.limits.max_batch, f"{self.name}: batch is over its maximum"
        assert not set(self.batch) & set(self.loading), f"{self.name}: a request is loading and decoding"
        assert set(self.to_inline) <= set(self.loading), f"{self.name}: a prompt waits for the device without a place"
        assert not self.stepping or self.inlining is None, f"{self.name}: a step and a prompt at once"
