"""Fitting a PolynomialCost to measurements (FAST25: polynomial regression on offline data), and how well it fits."""

from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import nnls

_HELD_OUT = 3  # one point in so many


def fit_prefill(points: Sequence[tuple[int, int, float]]) -> tuple[float, float, float]:
    """Least squares over measured (tokens, prefix, seconds)."""
    return _fit([_prefill_terms(t, p) for t, p, _ in points], [s for *_, s in points])


def fit_prefill_and_prefix(
    points: Sequence[tuple[int, int, float]],
) -> tuple[tuple[float, float, float], tuple[float, float]]:
    """The same, with what reusing a prefix takes: prefill_coefficients and prefix_coefficients."""
    rows = [(*_prefill_terms(t, p), float(p > 0), p) for t, p, _ in points]
    fitted = _fit(rows, [s for *_, s in points])
    return fitted[:3], fitted[3:]


def fit_step(points: Sequence[tuple[int, int, float]]) -> tuple[float, float, float]:
    """Least squares over measured (batch, total context, seconds)."""
    return _fit([(1.0, batch, context) for batch, context, _ in points], [s for *_, s in points])


def fit_transfer(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Least squares over measured (bytes, seconds)."""
    return _fit([(1.0, nbytes) for nbytes, _ in points], [s for _, s in points])


def fit_flows(points: Sequence[tuple[int, int, float]]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Least squares over measured (bytes, flows, seconds): transfer_coefficients and flow_coefficients."""
    rows = [(1.0, nbytes, flows - 1, (flows - 1) * nbytes) for nbytes, flows, _ in points]
    fitted = _fit(rows, [s for *_, s in points])
    return fitted[:2], fitted[2:]


def hold_out(points: Sequence[tuple]) -> tuple[list[tuple], list[tuple]]:
    """(points to fit, points to judge the fit by): every third of the latter, and neither the first nor the last."""
    held = set(range(1, len(points) - 1, _HELD_OUT))
    return [p for i, p in enumerate(points) if i not in held], [points[i] for i in sorted(held)]


def relative_errors(predict: Callable[..., float], points: Sequence[tuple]) -> list[float]:
    """|predicted / measured - 1| of each point (what predict takes, ..., seconds)."""
    return [abs(predict(*arguments) / seconds - 1) for *arguments, seconds in points]


def _prefill_terms(tokens: int, prefix: int) -> tuple[float, ...]:
    new = tokens - prefix
    return 1.0, new, new * (prefix + 0.5 * new)


def _fit(rows: list[tuple[float, ...]], seconds: list[float]) -> tuple[float, ...]:
    """Non-negative least squares on relative errors: short and long runs weigh alike."""
    weights = 1.0 / np.asarray(seconds)
    table = np.asarray(rows, float) * weights[:, None]
    scale = np.where(table.any(axis=0), np.abs(table).max(axis=0), 1.0)
    solution, _ = nnls(table / scale, np.ones(len(seconds)))
    return tuple(float(c) for c in solution / scale)
