"""What capacity.py counts of a run: how many of all requests are within a TBT limit, by either way to say TBT."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from clusters import capacity_curve, completed

from mooncake_jax.simulate.run import Run

LIMITS_MS = (100, 200, 300)
TTFT_LIMIT_S = 30.0
# Of a curve: 20 ms to 2 s, in steps of 12 %, and the limits.
GRID_MS = tuple(sorted({*LIMITS_MS, *(20 * 10 ** (step / 20) for step in range(41))}))


@dataclass(frozen=True)
class Measured:
    """tbts, means: rising, in seconds, of the requests within the TTFT limit: the mean of each one's longest 10 % of
    gaps, and of all its gaps; requests: how many there were.
    """

    tbts: Sequence[float]
    means: Sequence[float]
    requests: int

    def within(self, limit_ms: float) -> float:
        """Per cent of all requests."""
        return 100 * bisect.bisect_right(self.tbts, limit_ms / 1000) / self.requests

    def within_by_mean(self, limit_ms: float) -> float:
        """The same, if TBT were the mean of all gaps."""
        return 100 * bisect.bisect_right(self.means, limit_ms / 1000) / self.requests

    def curve(self) -> list[tuple[float, float]]:
        """(limit in ms, per cent)."""
        return [(limit, self.within(limit)) for limit in GRID_MS]


def measure(served: Run) -> Measured:
    tbts = [tbt for tbt, _ in capacity_curve(served.outcomes, TTFT_LIMIT_S)]
    soon = (outcome for outcome in completed(served.outcomes) if outcome.ttft_s <= TTFT_LIMIT_S)
    return Measured(tbts, sorted(outcome.tbt_mean_s or 0.0 for outcome in soon), len(served.outcomes))
