"""The tables of a sweep, as CSV and as pictures: a row a run, or a row a combination where goodput was sought."""

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mooncake_jax.commands.plots import INSTALL, can_plot, pyplot
from mooncake_jax.errors import UsageError

Row = dict[str, Any]
_LATENCIES = ("ttft_s", "tbt_mean_s", "tbt_top10_s")
_FIGURES = (
    ("duration_s",),
    ("workload", "requests_per_s"),
    *[("requests", name) for name in ("total", "completed", "rejected", "failed")],
    *[("tokens", name) for name in ("prompt", "reused", "output")],
    ("reuse_share",),
    ("output_tokens_per_s",),
    ("total_tokens_per_s",),
    *[(name, part) for name in _LATENCIES for part in ("mean", "p50", "p90", "p99")],
    ("attained",),
    ("attainment",),
    ("goodput_requests_per_s",),
)
_COLUMN_OF = {figure: "_".join(figure).removeprefix("workload_") for figure in _FIGURES}
FIGURES = tuple(_COLUMN_OF.values())  # columns
_MOST_LINES = 12  # that a picture's legend has room for


def figures(summary: dict[str, Any] | None) -> Row:
    """Of a run's summary, by column; without one all are empty."""
    row: Row = {}
    for figure, column in _COLUMN_OF.items():
        value: Any = summary
        for name in figure:
            value = None if value is None else value[name]
        row[column] = value
    return row


def has_figures(summary: Any) -> bool:
    """Whether it is a run's summary that lacks none of them, as another version of the code may have written."""
    try:
        return isinstance(summary, dict) and bool(figures(summary))
    except (LookupError, TypeError):
        return False


def write_csv(path: Path, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Whole or not at all. What a row lacks is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text.getvalue(), encoding="utf-8")
    partial.replace(path)


def check_picture(wanted: Sequence[str], columns: Sequence[str]) -> None:
    """Raises UsageError where a picture cannot be drawn."""
    for name in wanted:
        if name not in columns:
            raise UsageError(f"--picture: there is no figure {name!r}; use some of {','.join(columns)}")
    if wanted and not can_plot():
        raise UsageError(f"--picture={','.join(wanted)}: {INSTALL}")


def draw(path: Path, wanted: Sequence[str], axes: Sequence[str], rows: Sequence[Row]) -> None:
    """These figures one above the other, over the last axis whose values are numbers, or else over the last; a line for
    each combination of the others.
    """
    plot = pyplot()
    along = next((name for name in reversed(axes) if _numbers(rows, name)), axes[-1] if axes else None)
    lines: dict[str, list[Row]] = {}
    for row in rows:
        label = ", ".join(f"{name}={row[name]}" for name in axes if name != along)
        lines.setdefault(label, []).append(row)
    size = (7, 0.8 + 2.8 * len(wanted))
    figure, panels = plot.subplots(len(wanted), squeeze=False, sharex=True, figsize=size, layout="constrained")
    for name, [panel] in zip(wanted, panels):
        for label, points in lines.items():
            known = [row for row in points if row.get(name) is not None]
            x = [_place(row, along, rows) for row in known]
            panel.plot(x, [row[name] for row in known], "-o", label=label)
        panel.set_ylabel(name)
        panel.grid(alpha=0.3)
    panels[-1][0].set_xlabel(along or "")
    if 1 < len(lines) <= _MOST_LINES:
        panels[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=150)
    plot.close(figure)


def _numbers(rows: Sequence[Row], name: str) -> bool:
    try:
        [float(row[name]) for row in rows]
    except ValueError:
        return False
    return True


def _place(row: Row, along: str | None, rows: Sequence[Row]) -> float | str:
    if along is None:
        return ""
    return float(row[along]) if _numbers(rows, along) else row[along]
