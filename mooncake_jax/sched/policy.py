"""Where a request goes: prefill policies over a view of the cluster (report 6).

A policy reads the view and the request (never its output_length) and returns Dispatch or Reject. It changes nothing.
"""

import math
from dataclasses import dataclass, field
from typing import Protocol

from mooncake_jax.cache.pool import KVCachePool
from mooncake_jax.request import SLO, Request
from mooncake_jax.sched.cost import CostModel


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Prefill here, decode there; first copy the leading `replicate_blocks` blocks from `replicate_from`, if that is
    set.
    """

    prefill: str
    decoding: str
    ttft: float  # predicted, seconds
    tbt: float
    replicate_from: str | None = None
    replicate_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Reject:
    reason: str


@dataclass(slots=True)
class PrefillQueue:
    """Conductor's belief of one prefill instance: by dispatch number estimated seconds, and when those that run
    began.
    """

    estimates: dict[int, float] = field(default_factory=dict)
    begun: dict[int, float] = field(default_factory=dict)

    def seconds(self, now: float) -> float:
        """T_queue: estimated seconds until everything dispatched so far is done."""
        return math.fsum(max(0.0, seconds - self._elapsed(number, now)) for number, seconds in self.estimates.items())

    def begin(self, dispatch: int, estimate: float, now: float) -> None:
        self.estimates[dispatch], self.begun[dispatch] = estimate, now

    def end(self, dispatch: int) -> None:
        self.estimates.pop(dispatch, None)
        self.begun.pop(dispatch, None)

    def _elapsed(self, dispatch: int, now: float) -> float:
        return now - self.begun.get(dispatch, now)


@dataclass(slots=True)
class DecodingLoad:
    """Conductor's belief of one decoding instance: dispatch number -> context tokens, those still in prefill
    included.
    """

    contexts: dict[int, int] = field(default_factory=dict)
    total: int = 0

    def add(self, dispatch: int, tokens: int) -> None:
        self.contexts[dispatch] = self.contexts.get(dispatch, 0) + tokens
        self.total += tokens

    def remove(self, dispatch: int) -> None:
        self.total -= self.contexts.pop(dispatch, 0)


@dataclass(slots=True)
class ClusterView:
    """What Conductor knows when it decides."""

    prefill: dict[str, PrefillQueue]
    decoding: dict[str, DecodingLoad]
    pool: KVCachePool
    cost: CostModel
    slo: SLO
    block_size: int
    bytes_per_token: int

    def reusable_tokens(self, blocks: int, prompt_tokens: int) -> int:
        """Tokens that so many matching blocks spare; the last prompt token is always computed."""
        return min(blocks * self.block_size, prompt_tokens - 1)


class Policy(Protocol):
    def choose(self, request: Request, view: ClusterView, now: float) -> Dispatch | Reject: ...


@dataclass(frozen=True)
class KVCacheCentric:
    """Algorithm 1: the smallest predicted TTFT, weighing reuse, queues and the replication of hot blocks."""

    kvcache_balancing_threshold: float = 2.0

    def choose(self, request: Request, view: ClusterView, now: float) -> Dispatch | Reject:
        if not view.prefill or not view.decoding:
            return Reject(f"no {'prefill' if not view.prefill else 'decoding'} instance is alive")
        prefill, prefix, best, best_prefix, matches, ttft = self._choose_prefill(request, view, now)
        decoding, tbt = least_loaded(request, view)
        if ttft > view.slo.ttft:
            return Reject(f"predicted TTFT {ttft:.3f} s is above the SLO of {view.slo.ttft:g} s")
        if tbt > view.slo.tbt:
            return Reject(f"predicted TBT {tbt:.3f} s is above the SLO of {view.slo.tbt:g} s")
        if best_prefix > self.kvcache_balancing_threshold * prefix:
            return Dispatch(prefill, decoding, ttft, tbt, best, matches[best])
        return Dispatch(prefill, decoding, ttft, tbt)

    def _choose_prefill(self, request: Request, view: ClusterView, now: float):
        matches = view.pool.match(request.block_keys)
        prefixes = {node: view.reusable_tokens(matches[node], request.prompt_tokens) for node in view.prefill}
        best = max(view.prefill, key=prefixes.__getitem__)
        best_prefix = prefixes[best]
        chosen, ttft = None, float("inf")
        for node, queue in view.prefill.items():
            estimate = queue.seconds(now)
            # best / prefix < threshold, without dividing by 0; nothing cached anywhere leaves nothing to balance
            if best_prefix < self.kvcache_balancing_threshold * prefixes[node] or best_prefix == 0:
                estimate += view.cost.prefill(request.prompt_tokens, prefixes[node])
            else:
                moved = (best_prefix - prefixes[node]) * view.bytes_per_token
                estimate += view.cost.transfer(moved) + view.cost.prefill(request.prompt_tokens, best_prefix)
            if chosen is None or estimate < ttft:
                chosen, ttft = node, estimate
        return chosen, prefixes[chosen], best, best_prefix, matches, ttft


def least_loaded(request: Request, view: ClusterView) -> tuple[str, float]:
    """The decoding instance with the lowest predicted TBT once this request has joined it."""

    def predicted(node: str) -> float:
        load = view.decoding[node]
        return view.cost.step(len(load.contexts) + 1, load.total + request.prompt_tokens)

    chosen = min(view.decoding, key=predicted)
    return chosen, predicted(chosen)
