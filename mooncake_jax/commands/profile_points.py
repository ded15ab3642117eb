"""What `mooncake-jax profile` measures, and the cost model it makes of that: pure functions of numbers.

Lengths are spread evenly over their logarithm, and no round ones: engines pad to powers of two, requests do not come in
them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mooncake_jax.metrics import percentile
from mooncake_jax.sched.cost import CostModel
from mooncake_jax.sched.cost_file import CostRange
from mooncake_jax.sched.cost_padded import PaddedCost, padded_prefills, padded_steps
from mooncake_jax.sched.fitting import (
    fit_flows,
    fit_prefill_and_prefix,
    fit_step,
    fit_transfer,
    hold_out,
    relative_errors,
)

SHORTEST = 16  # tokens
_LENGTHS, _BATCHES, _CONTEXTS, _LOADS, _SIZES = 14, 8, 4, 8, 8  # how many of each: a prime and one spreads best
_REUSED = (0.3, 0.6, 0.9)  # shares of a prompt, in turns
_STEP_TOKENS = 16384  # most context of a batch: its KVCache must lie in memory
MOST_BATCH = _STEP_TOKENS // SHORTEST  # requests of a step
_LEAST_BYTES, _MOST_BYTES = 1 << 16, 1 << 26
_FLOWS = (1, 2, 3, 4)

# Parts of a cost model, and what their points are beside seconds.
PREFILL, STEP, TRANSFER, LOAD = "prefill", "step", "transfer", "load"
Points = Mapping[str, list[tuple]]


@dataclass(frozen=True)
class Shapes:
    """prefill: (tokens, prefix); steps: (batch, context of each request); loads: tokens; transfers: (bytes, flows)."""

    prefill: list[tuple[int, int]]
    steps: list[tuple[int, int]]
    loads: list[int]
    transfers: list[tuple[int, int]]

    @property
    def range(self) -> CostRange:
        """Where the cost model is measured: of contexts, those of the largest batch and of the longest request."""
        tokens, batches = [tokens for tokens, _ in self.prefill], [batch for batch, _ in self.steps]
        contexts = [batch * context for batch, context in self.steps]
        return CostRange(
            tokens=(min(tokens), max(tokens)),
            batch=(min(batches), max(batches)),
            context=(min(contexts), max(contexts)),
            nbytes=(_LEAST_BYTES, _MOST_BYTES),
            flows=(min(_FLOWS), max(_FLOWS)),
        )


@dataclass(frozen=True)
class Fit:
    """How well a part of the cost model predicts points that it was not fitted to: |predicted / measured - 1|."""

    fitted: int
    held_out: int
    p50: float
    p95: float
    worst: float


def shapes(longest: int, max_batch: int, block_size: int) -> Shapes:
    """longest: tokens of the longest prompt and context; whole blocks are reused."""
    prefill = []
    for i, tokens in enumerate(spread(SHORTEST, longest, _LENGTHS)):
        wanted = round(tokens * _REUSED[i % len(_REUSED)] / block_size)
        prefix = min(wanted, (tokens - 1) // block_size) * block_size
        prefill += [(tokens, 0), (tokens, prefix)] if prefix else [(tokens, 0)]
    steps = [
        (batch, context)
        for batch in spread(1, max_batch, _BATCHES)
        for context in spread(SHORTEST, max(min(longest, _STEP_TOKENS // batch), SHORTEST), _CONTEXTS)
    ]
    transfers = [(nbytes, flows) for nbytes in spread(_LEAST_BYTES, _MOST_BYTES, _SIZES) for flows in _FLOWS]
    loads = spread(max(longest // 16, SHORTEST), longest, _LOADS)  # shorter ones are lost in the noise of a step
    return Shapes(prefill, steps, loads, transfers)


def spread(least: int, most: int, count: int) -> list[int]:
    """At most so many whole numbers, evenly spread over their logarithm, both ends among them."""
    steps = max(count - 1, 1)
    return sorted({round(least * (most / least) ** (i / steps)) for i in range(steps + 1)})


def fit(points: Points, chunk: int) -> PaddedCost:
    """prefill: (tokens, prefix, seconds); step: (batch, context in total, seconds); transfer: (bytes, flows, seconds);
    load: (bytes, seconds). chunk: the most tokens that a prefill computes at once.
    """
    prefill, prefix = fit_prefill_and_prefix(padded_prefills(points[PREFILL], chunk))
    transfer, flow = fit_flows(points[TRANSFER])
    return PaddedCost(
        prefill_coefficients=prefill,
        prefix_coefficients=prefix,
        step_coefficients=fit_step(padded_steps(points[STEP])),
        transfer_coefficients=transfer,
        flow_coefficients=flow,
        load_coefficients=fit_transfer(points[LOAD]) if points[LOAD] else (0.0, 0.0),
        chunk=chunk,
    )


def fit_and_judge(points: Points, chunk: int) -> tuple[PaddedCost, dict[str, Fit]]:
    """The cost model fitted to a part of the points, and how it predicts the others."""
    parts = {part: hold_out(measured) for part, measured in points.items()}
    cost = fit({part: fitted for part, (fitted, _) in parts.items()}, chunk)
    fits = {}
    for part, (fitted, held) in parts.items():
        errors = relative_errors(predictor(cost, part), held)
        if errors:
            fits[part] = Fit(len(fitted), len(held), percentile(errors, 50), percentile(errors, 95), max(errors))
    return cost, fits


def predictor(cost: CostModel, part: str) -> Callable[..., float]:
    """What predicts this part's points."""
    return {PREFILL: cost.prefill, STEP: cost.step, TRANSFER: cost.transfer, LOAD: cost.load}[part]
