"""DecodingInstance: the local scheduler of a decoding instance, continuous batching (report 3, step 4).

Requests whose KVCache has arrived are loaded to device memory first come first served while the others decode, and
join the next batch. Memory for the whole output is set aside on joining, so that no running request is ever evicted.
"""

from dataclasses import dataclass

from mooncake_jax.request import Request
from mooncake_jax.sched.messages import (
    CONDUCTOR,
    Action,
    Cancel,
    DecodingFailed,
    DropKVCache,
    KVCacheLoaded,
    KVCacheReceived,
    LoadKVCache,
    Message,
    RunStep,
    Send,
    StepDone,
    StepFailed,
    Token,
    TokensDecoded,
)


@dataclass(frozen=True, slots=True)
class DecodingLimits:
    """max_batch requests at once; pages of page_size tokens in device memory; ids that end a request."""

    max_batch: int
    pages: int
    page_size: int
    stop_ids: frozenset[int] = frozenset()

    def pages_for(self, request: Request) -> int:
        return -(-(request.prompt_tokens + request.output_length) // self.page_size)


@dataclass(slots=True)
class _Joined:
    received: KVCacheReceived
    pages: int
    produced: int = 0


class DecodingInstance:
    def __init__(self, name: str, limits: DecodingLimits):
        self.name, self.limits = name, limits
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
        self.waiting.append(received)
        return []

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
        return sum(j.pages for j in self.batch.values()) + sum(j.pages for j in self.loading.values())

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
