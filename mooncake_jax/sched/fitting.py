"""Fitting a PolynomialCost to measurements (FAST25: polynomial regression on offline data)."""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls


def fit_prefill(points: Sequence[tuple[int, int, float]]) -> tuple[float, float, float]:
    """Least squares over measured (tokens, prefix, seconds)."""
    return _fit([(1.0, t - p, (t - p) * (p + 0.5 * (t - p))) for t, p, _ in points], [s for *_, s in points])


def fit_step(points: Sequence[tuple[int, int, float]]) -> tuple[float, float, float]:
    """Least squares over measured (batch, total context, seconds)."""
    return _fit([(1.0, batch, context) for batch, context, _ in points], [s for *_, s in points])


def fit_transfer(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Least squares over measured (bytes, seconds)."""
    return _fit([(1.0, nbytes) for nbytes, _ in points], [s for _, s in points])


def _fit(rows: list[tuple[float, ...]], seconds: list[float]) -> tuple[float, ...]:
    """Non-negative least squares on relative errors: short and long runs weigh alike."""
    weights = 1.0 / np.asarray(seconds)
    table = np.asarray(rows, float) * weights[:, None]
    scale = np.where(table.any(axis=0), np.abs(table).max(axis=0), 1.0)
    solution, _ = nnls(table / scale, np.ones(len(seconds)))
    return tuple(float(c) for c in solution / scale)
