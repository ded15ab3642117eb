"""How fast a trace may be replayed while enough requests meet their SLO, by bisection (FAST25 5.2: effective capacity).

Between two speeds, of which the lower keeps the attainment and the higher does not, it tries their geometric mean until
they lie close together. Attainment need not fall steadily with speed: the answer is a place where it stops being kept,
and says what was measured at both ends. Knows nothing of how a speed is tried.
"""

import math
from collections.abc import Generator
from dataclasses import dataclass

from mooncake_jax.commands.sweep_file import GoodputSearch

FOUND = "found"
LOWEST_FAILS = "even the lowest speed fails"
HIGHEST_KEEPS = "even the highest speed keeps it"


@dataclass(frozen=True, slots=True)
class Bracket:
    """kept: the highest speed tried that kept the attainment, failed: the lowest above it that did not, or None."""

    kept: float | None
    failed: float | None

    @property
    def answer(self) -> str:
        if self.kept is None:
            return LOWEST_FAILS
        return FOUND if self.failed is not None else HIGHEST_KEEPS


def bisect(search: GoodputSearch) -> Generator[float, float, Bracket]:
    """Yields speeds to be tried, and is sent the attainment of each."""
    if (yield search.lowest) < search.attainment:
        return Bracket(None, search.lowest)
    if (yield search.highest) >= search.attainment:
        return Bracket(search.highest, None)
    kept, failed = search.lowest, search.highest
    while failed > kept * (1 + search.tolerance):
        speed = _between(kept, failed)
        if (yield speed) >= search.attainment:
            kept = speed
        else:
            failed = speed
    return Bracket(kept, failed)


def most_tries(search: GoodputSearch) -> int:
    halvings = math.log2(math.log(search.highest / search.lowest) / math.log1p(search.tolerance))
    return 2 + max(0, math.ceil(halvings))


def _between(low: float, high: float) -> float:
    """In a few digits, for people."""
    return float(f"{math.sqrt(low * high):.6g}")
