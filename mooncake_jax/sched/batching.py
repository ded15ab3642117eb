"""Continuous batching: a batch whose requests get a token each a step, and leave it as soon as they are done.

What decoding instances (decoding.py) and coupled ones (coupled.py) have in common. Knows nothing of how requests come
into the batch.
"""

import math
from dataclasses import dataclass

from mooncake_jax.request import Request
from mooncake_jax.sched.actions import Action, DropKVCache, Send
from mooncake_jax.sched.messages import CONDUCTOR, StepDone, StepsDecoded, StepsDone, Token, TokensDecoded


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


@dataclass(slots=True)
class Running:
    """A request in the batch, or about to join it."""

    request: Request
    produced: int = 0  # tokens of output


class ContinuousBatching:
    """batch: by dispatch number, in the order they joined; stepping: whether the device is at work."""

    def __init__(self, name: str, limits: DecodingLimits):
        self.name, self.limits = name, limits
        self.batch: dict[int, Running] = {}
        self.stepping = False

    def _deliver(self, step: StepDone, now: float) -> list[Action]:
        """Hand out one token for each request; those that are done leave the batch."""
        delivered, leaving, logprobs = [], [], dict(step.logprobs)
        for dispatch, token_id in step.tokens:
            running = self.batch.get(dispatch)
            if running is None:  # cancelled meanwhile
                continue
            running.produced += 1
            last = dispatch in step.stopped or self._is_last(running, token_id)
            delivered.append(Token(dispatch, token_id, last, logprobs.get(dispatch)))
            if last:
                leaving.append(self._leave(dispatch))
        if not delivered:
            return leaving
        return [*leaving, Send(CONDUCTOR, TokensDecoded(self.name, now, tuple(delivered)))]

    def _deliver_steps(self, steps: StepsDone) -> list[Action]:
        """What _deliver() would do for each of them."""
        batch, ended, count = self.batch, [], len(steps.ends)
        delivered = tuple([dispatch for dispatch in steps.batch if dispatch in batch])  # the others were cancelled
        if not delivered:
            return []
        for dispatch in delivered:
            running = batch[dispatch]
            running.produced += count
            if running.produced >= running.request.output_length:
                ended.append(dispatch)
        leaving = [self._leave(dispatch) for dispatch in ended]
        return [*leaving, Send(CONDUCTOR, StepsDecoded(self.name, steps.ends, delivered, tuple(ended)))]

    def _is_last(self, running: Running, token_id: int | None) -> bool:
        request = running.request
        end_of_text = token_id in self.limits.stop_ids and not request.ignore_eos
        return end_of_text or token_id in request.stop_ids or running.produced >= request.output_length

    def _leave(self, dispatch: int) -> DropKVCache:
        """It is no longer in the batch."""
        del self.batch[dispatch]
        return DropKVCache(dispatch)
