"""CoupledInstance: prefill and decoding on one device, as vLLM does it, the paper's baseline (report 8).

Iteration by iteration: waiting prompts go first, whole, as many as the token budget and the memory take, and nobody
decodes meanwhile; or, with chunks, each iteration is a step of all that decode and what of the budget they leave of
the first prompts. First come, first served: a prompt that finds no room keeps those behind it waiting. Memory for the
whole output is set aside as a prompt is taken in, so that no running request is ever evicted. Knows nothing of other
instances, nor of the KVCache pool: what it reuses lies in its own device's memory.
"""

from collections import deque
from dataclasses import dataclass, replace

from mooncake_jax.request import Request
from mooncake_jax.sched.actions import Action, DropKVCache, PrefillPart, RunIteration, RunStep, Send
from mooncake_jax.sched.batching import ContinuousBatching, DecodingLimits, Running
from mooncake_jax.sched.device_pages import DevicePages
from mooncake_jax.sched.messages import (
    CONDUCTOR,
    Cancel,
    DecodingFailed,
    Message,
    PrefillDone,
    PrefillFailed,
    PrefillStarted,
    StartPrefill,
    StepDone,
    StepFailed,
    StepsDone,
)


@dataclass(frozen=True, slots=True)
class CoupledMode:
    """token_budget: tokens of an iteration with prefill; a whole prompt may be longer if it is the only one. chunked:
    prompts are computed in parts, beside a decoding step; reuses: prefixes whose KVCache is still in the device's
    memory are; alone: one request at a time, from its prefill to its last token.
    """

    token_budget: int
    chunked: bool = False
    reuses: bool = False
    alone: bool = False


# What decides the baseline's results is the budgets: those that come closest to FAST25 figures 1, 7 and 8.
COUPLED_MODES = {
    "plain": CoupledMode(16_384),
    "prefix_cache": CoupledMode(16_384, reuses=True),
    "chunked_prefill": CoupledMode(2048, chunked=True),
    "one_by_one": CoupledMode(16_384, reuses=True, alone=True),
}


@dataclass(slots=True)
class _Prefilling:
    """A prompt that has been taken in. reused, done: leading tokens whose KVCache was, and is, there."""

    request: Request
    reused: int
    done: int
    begun: float


class CoupledInstance(ContinuousBatching):
    def __init__(self, name: str, limits: DecodingLimits, mode: CoupledMode):
        super().__init__(name, replace(limits, max_batch=1) if mode.alone else limits)
        self.mode = mode
        self.pages = DevicePages(limits.pages, limits.page_size, mode.reuses)
        self.waiting: deque[StartPrefill] = deque()
        self.prefilling: dict[int, _Prefilling] = {}
        self.parts: tuple[PrefillPart, ...] = ()  # of the iteration under way

    def handle(self, message: Message, now: float) -> list[Action]:
        match message:
            case StartPrefill():
                actions = self._receive(message)
            case StepDone():
                self.stepping = False
                actions = [*self._prefilled(now), *self._deliver(message, now)]
            case StepsDone():
                self.stepping = message.more
                actions = self._deliver_steps(message)
            case StepFailed(reason):
                self.stepping, self.parts = False, ()
                actions = [
                    action for dispatch in [*self.prefilling, *self.batch] for action in self._fail(dispatch, reason)
                ]
            case Cancel(dispatch):
                actions = self._fail(dispatch, "cancelled")
            case _:
                raise TypeError(f"{self.name} cannot handle {type(message).__name__}")
        return actions + self._iterate(now)

    def _receive(self, start: StartPrefill) -> list[Action]:
        needed = self.limits.pages_for(start.request)
        if needed > self.limits.pages:  # it would wait for ever, and all behind it
            reason = f"needs {needed} pages, of which there are {self.limits.pages}"
            return [Send(CONDUCTOR, PrefillFailed(start.dispatch, self.name, reason))]
        self.waiting.append(start)
        return []

    # --- what is computed next

    def _iterate(self, now: float) -> list[Action]:
        if self.stepping:
            return []
        actions = self._take_in(now)
        self.parts = tuple(self._parts())
        if not self.parts and not self.batch:
            return actions
        self.stepping = True
        if not self.parts:
            return [*actions, RunStep(tuple(self.batch))]
        return [*actions, RunIteration(self.parts, tuple(self.batch) if self.mode.chunked else ())]

    def _take_in(self, now: float) -> list[Action]:
        """Waiting prompts, while the budget of the next iteration, the batch and the memory have room for them."""
        actions: list[Action] = []
        left = self._budget() - sum(p.request.prompt_tokens - p.done for p in self.prefilling.values())
        while self.waiting and left > 0 and len(self.batch) + len(self.prefilling) < self.limits.max_batch:
            start = self.waiting[0]
            request, reused = start.request, self.pages.reusable(start.request)
            computed = request.prompt_tokens - reused
            if computed > left and self.prefilling and not self.mode.chunked:
                break
            if not self.pages.take(start.dispatch, request, self.limits.pages_for(request)):
                break
            self.waiting.popleft()
            self.prefilling[start.dispatch] = _Prefilling(request, reused, reused, now)
            left -= computed
            actions.append(Send(CONDUCTOR, PrefillStarted(start.dispatch, self.name, reused)))
        return actions

    def _parts(self) -> list[PrefillPart]:
        parts, left = [], self._budget()
        for dispatch, prompt in self.prefilling.items():
            tokens = prompt.request.prompt_tokens - prompt.done
            if self.mode.chunked:
                tokens = min(tokens, left)
            if tokens > 0:
                parts.append(PrefillPart(dispatch, prompt.request, prompt.done, tokens))
            left -= tokens
        return parts

    def _budget(self) -> int:
        """Tokens of prompts in the next iteration."""
        return max(0, self.mode.token_budget - len(self.batch)) if self.mode.chunked else self.mode.token_budget

    # --- what has been computed

    def _prefilled(self, now: float) -> list[Action]:
        """Prompts of which the iteration has computed the last part join the batch; its tokens are handed out then."""
        actions: list[Action] = []
        for part in self.parts:
            prompt = self.prefilling.get(part.dispatch)
            if prompt is None:  # cancelled meanwhile
                continue
            prompt.done += part.tokens
            if prompt.done < prompt.request.prompt_tokens:
                continue
            del self.prefilling[part.dispatch]
            self.batch[part.dispatch] = Running(prompt.request)
            self.pages.landed(part.dispatch, prompt.request)
            done = PrefillDone(part.dispatch, self.name, prompt.reused, now - prompt.begun, ())
            actions.append(Send(CONDUCTOR, done))
        self.parts = ()
        return actions

    # --- endings

    def _leave(self, dispatch: int) -> DropKVCache:
        self.pages.release(dispatch)
        return super()._leave(dispatch)

    def _fail(self, dispatch: int, reason: str) -> list[Action]:
        """It ends here, wherever it is; what the device is computing of it is for nobody."""
        if dispatch in self.batch:
            return [self._leave(dispatch), Send(CONDUCTOR, DecodingFailed(dispatch, self.name, reason))]
        failed = Send(CONDUCTOR, PrefillFailed(dispatch, self.name, reason))
        if self.prefilling.pop(dispatch, None) is not None:
            self.pages.release(dispatch)
            return [DropKVCache(dispatch), failed]
        there = [start for start in self.waiting if start.dispatch == dispatch]
        if not there:
            return []
        self.waiting.remove(there[0])
        return [failed]

    def check(self) -> None:
        """Assert the invariants."""
        self.pages.check()
        inside = [*self.batch, *self.prefilling]
        assert len(inside) <= self.limits.max_batch, f"{self.name}: {len(inside)} requests are in at once"
        everyone = [*inside, *(start.dispatch for start in self.waiting)]
        assert len(set(everyone)) == len(everyone), f"{self.name}: a request is in twice"
        assert self.stepping or not everyone, f"{self.name}: requests wait while the device rests"
