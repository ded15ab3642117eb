"""A cost model of measured points, with straight lines between them.

It believes what was measured, steps and bends included, where a polynomial smooths them over; in return it needs many
points. Knows nothing of how they were measured.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

from mooncake_jax.errors import UsageError
from mooncake_jax.sched.cost import LinkCosts

# (where the row is, ((where the point is, seconds), ...)), ...
Rows = tuple[tuple[int, tuple[tuple[int, float], ...]], ...]
_Row = tuple[list[int], list[float]]


@dataclass(frozen=True)
class TableCost(LinkCosts):
    """prefill_rows: by reused tokens, seconds by computed tokens, loading included. step_rows: by batch, seconds by
    context tokens in total. Rows ascend, and so do the points of each; rows need not have the same points.

    Before the first point or row its value holds; beyond the last, what led to it goes on, but never down. Raises
    UsageError for rows that are empty, do not ascend, or hold seconds that are no time.
    """

    prefill_rows: Rows
    step_rows: Rows
    transfer_coefficients: tuple[float, float]
    flow_coefficients: tuple[float, float]
    load_coefficients: tuple[float, float]
    ssd_read_coefficients: tuple[float, float]
    ssd_write_coefficients: tuple[float, float]

    def __post_init__(self):
        for name in ("prefill_rows", "step_rows"):
            _check(name, getattr(self, name))

    def prefill(self, tokens: int, prefix: int) -> float:
        return _look_up(*self._prefill, prefix, tokens - prefix)

    def prefill_compute(self, tokens: int, prefix: int) -> float:
        """Measurement does not tell loading from computing: it is all of it."""
        return self.prefill(tokens, prefix)

    def step(self, batch: int, context: int) -> float:
        return _look_up(*self._step, batch, context)

    @cached_property
    def _prefill(self) -> tuple[list[int], list[_Row]]:
        return _columns(self.prefill_rows)

    @cached_property
    def _step(self) -> tuple[list[int], list[_Row]]:
        return _columns(self.step_rows)


def _columns(rows: Rows) -> tuple[list[int], list[_Row]]:
    """Places apart from values, as bisect wants them."""
    return [place for place, _ in rows], [([x for x, _ in points], [s for _, s in points]) for _, points in rows]


def _look_up(places: list[int], rows: list[_Row], place: int, x: int) -> float:
    if len(places) == 1:
        return _along(*rows[0], x)
    above = _segment(places, place)
    return _line(
        places[above - 1], _along(*rows[above - 1], x), places[above], _along(*rows[above], x), place, places[-1]
    )


def _along(xs: list[int], seconds: list[float], x: int) -> float:
    if len(xs) == 1:
        return seconds[0]
    above = _segment(xs, x)
    return _line(xs[above - 1], seconds[above - 1], xs[above], seconds[above], x, xs[-1])


def _segment(xs: list[int], x: int) -> int:
    """The end of the segment that x is in, or is nearest to."""
    return min(max(bisect_left(xs, x), 1), len(xs) - 1)


def _line(x0: int, y0: float, x1: int, y1: float, x: int, last: int) -> float:
    if x <= x0:
        return y0
    if x == x1 or (x > last and y1 < y0):
        return y1
    return y0 + (y1 - y0) * ((x - x0) / (x1 - x0))


def _check(name: str, rows: Rows) -> None:
    if not rows or not all(points for _, points in rows):
        raise UsageError(f"{name} has no points; measure some")
    for xs in ([place for place, _ in rows], *([x for x, _ in points] for _, points in rows)):
        if not all(before < after for before, after in zip(xs, xs[1:], strict=False)):
            raise UsageError(f"{name} goes {', '.join(map(str, xs[:8]))}; it must ascend")
    for place, points in rows:
        for x, seconds in points:
            if not (seconds >= 0 and math.isfinite(seconds)):
                raise UsageError(f"{name} says {seconds} s at {place}, {x}; it must be a time, at least 0")
