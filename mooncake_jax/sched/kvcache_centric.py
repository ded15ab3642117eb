"""Algorithm 1: KVCache-centric scheduling (report 6.1), without its balancing branch, and with a threshold that adapts.

For each prefill instance the TTFT is predicted from its queue and from what it has of the prompt; the least wins, and
of equals the first. Where another instance has much more of the prompt, the prediction is for copying that here first;
if such an instance wins, it is copied, which replicates hot blocks (report 6.2). The last lines of the algorithm, which
reject what misses its SLO, are SLOCheck in admission.py.
"""

import math
import sys
from collections.abc import Mapping
from itertools import chain
from typing import NamedTuple

from mooncake_jax.errors import UsageError
from mooncake_jax.sched.decisions import Dispatch
from mooncake_jax.sched.placement import least_loaded
from mooncake_jax.sched.view import ClusterView, RequestView

LARGEST = sys.float_info.max  # best_len / 0: less than a threshold of math.inf, which nothing reaches


class Match(NamedTuple):
    """Leading blocks of a prompt that an instance has."""

    node: str
    blocks: int


class KVCacheCentric:
    """threshold: the kvcache_balancing_threshold, what best_len / prefix_len must reach for an instance to be judged as
    if the missing blocks had been copied there; at least 1, and with math.inf nothing is ever copied.
    """

    def __init__(self, threshold: float = 2.0):
        if not threshold >= 1:
            raise UsageError(
                f"--kvcache_balancing_threshold={threshold}: it must be at least 1, where matches are equal"
            )
        self.threshold = threshold

    def choose(self, request: RequestView, view: ClusterView, now: float) -> Dispatch:
        matches = view.pool.match(request.block_keys)
        best = best_match(view, matches)
        prefill, ttft = self._quickest(request, view, now, matches, best)
        decoding, tbt = least_loaded(request, view)
        if self._ratio(request, view, matches[prefill], best.blocks) > self.threshold:
            return Dispatch(prefill, decoding, ttft, tbt, best.node, best.blocks)
        return Dispatch(prefill, decoding, ttft, tbt)

    def _quickest(
        self, request: RequestView, view: ClusterView, now: float, matches: Mapping[str, int], best: Match
    ) -> tuple[str, float]:
        """The instance with the least predicted TTFT, and that."""
        known: dict[int, tuple[float, float]] = {}  # by number of blocks: many instances have equally many
        chosen, least = "", math.inf
        for node, queue in view.prefill.items():
            blocks = matches[node]
            if blocks not in known:
                known[blocks] = self._seconds(request, view, blocks, best)
            transfer, prefill = known[blocks]
            ttft = transfer + queue.seconds(now) + queue.pace.factor * prefill
            if ttft < least:
                chosen, least = node, ttft
        return chosen, least

    def _seconds(self, request: RequestView, view: ClusterView, blocks: int, best: Match) -> tuple[float, float]:
        """T_transfer and T_prefill at an instance that has so many blocks."""
        if self._ratio(request, view, blocks, best.blocks) < self.threshold:
            return 0.0, compute_seconds(request, view, blocks)
        return copy_seconds(request, view, blocks, best), compute_seconds(request, view, best.blocks)

    def _ratio(self, request: RequestView, view: ClusterView, blocks: int, best: int) -> float:
        """best_len / prefix_len; 0 where nobody has anything, so that there is nothing to copy."""
        prefix_len = view.reusable_tokens(blocks, request.prompt_tokens)
        best_len = view.reusable_tokens(best, request.prompt_tokens)
        if best_len <= 0:
            return 0.0
        return best_len / prefix_len if prefix_len > 0 else LARGEST


class CacheAware(KVCacheCentric):
    """Algorithm 1 without its balancing branch: an instance counts with what it has itself, and nothing is copied."""

    def __init__(self):
        super().__init__(math.inf)


class AdaptiveKVCacheCentric(KVCacheCentric):
    """Algorithm 1 with a threshold that finds itself where copying begins to pay, which the report leaves to operators.

    Each time an instance is chosen that has less than the best match, both of its estimates are compared: computing
    with what it has, and copying first. If the threshold took the longer one it moves by STEP towards the other: down
    where copying would have been quicker, up where computing would have. So it follows the prompts, the links (their
    pace is learned, report 6.1's congestion) and the prefill's real speed. It counts the request at hand alone, not
    what later ones gain from a replica. A block is added to both lengths of the ratio: else an instance that has
    nothing would be copied to under any threshold, however slow the link.
    """

    STEP = 1.05
    MOST = 64.0

    def __init__(self, threshold: float = 2.0):
        if math.isinf(threshold):
            raise UsageError(
                "--kvcache_balancing_threshold=inf: --policy=adaptive begins with it and would never get away from it; "
                "give a finite one"
            )
        super().__init__(threshold)

    def choose(self, request: RequestView, view: ClusterView, now: float) -> Dispatch:
        decision = super().choose(request, view, now)
        self._adapt(request, view, decision.prefill)
        return decision

    def _adapt(self, request: RequestView, view: ClusterView, prefill: str) -> None:
        matches = view.pool.match(request.block_keys)
        blocks, best = matches[prefill], best_match(view, matches)
        if blocks == best.blocks:
            return
        pace = view.prefill[prefill].pace.factor
        compute = pace * compute_seconds(request, view, blocks)
        copy = copy_seconds(request, view, blocks, best) + pace * compute_seconds(request, view, best.blocks)
        copies = self._ratio(request, view, blocks, best.blocks) >= self.threshold
        if copies and compute < copy:
            self.threshold = min(self.threshold * self.STEP, self.MOST)
        elif not copies and copy < compute:
            self.threshold = max(self.threshold / self.STEP, 1.0)

    def _ratio(self, request: RequestView, view: ClusterView, blocks: int, best: int) -> float:
        if blocks == best:
            return 0.0
        prefix_len = view.reusable_tokens(blocks, request.prompt_tokens)
        best_len = view.reusable_tokens(best, request.prompt_tokens)
        return (best_len + view.block_size) / (prefix_len + view.block_size)


def best_match(view: ClusterView, matches: Mapping[str, int]) -> Match:
    """The longest; of equals, that of the first instance. Those that have moved to decoding keep what they have."""
    node = max(chain(view.prefill, view.moved), key=matches.__getitem__)
    return Match(node, matches[node])


def compute_seconds(request: RequestView, view: ClusterView, blocks: int) -> float:
    """T_prefill where so many leading blocks are reused, by the cost model."""
    return view.cost.prefill(request.prompt_tokens, view.reusable_tokens(blocks, request.prompt_tokens))


def copy_seconds(request: RequestView, view: ClusterView, blocks: int, best: Match) -> float:
    """T_transfer of what the best match has beyond so many blocks."""
    reusable = view.reusable_tokens
    transferred = reusable(best.blocks, request.prompt_tokens) - reusable(blocks, request.prompt_tokens)
    return view.transfer(transferred, best.node)
