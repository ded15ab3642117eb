"""The paper's own points, from the CSVs of paper/ (paper/README.md says how they were read off, and how exactly)."""

import csv
import functools
from pathlib import Path

from mooncake_jax.errors import UsageError

FOLDER = Path(__file__).parent / "paper"
# Flags of rows that are no data points: inferred or cut at an edge, capped by the authors, lines that guide the eye.
_NO_POINTS = ("extrapolated", "canvas", "display_cap", "guide", "reference_line", "drawn_vertex")

X = float | str

_opened: set[Path] = set()


@functools.cache
def rows(name: str) -> tuple[dict[str, str], ...]:
    """All rows of paper/<name>.csv as they stand, those with flags too. Raises UsageError."""
    file = FOLDER / f"{name}.csv"
    try:
        with file.open(newline="", encoding="utf-8") as lines:
            found = tuple(csv.DictReader(lines))
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}; name one of the files in {FOLDER}") from None
    _opened.add(file)
    return found


def opened() -> frozenset[Path]:
    """The files whose rows this process has read."""
    return frozenset(_opened)


def points(name: str, series: str | None = None) -> dict[str, list[tuple[X, float]]]:
    """By series, the (x, y) that were measured, in the file's units and order; `series`: that one alone.

    x is the first column x_..., a number where it is one; y the first column y_.... Raises UsageError.
    """
    found: dict[str, list[tuple[X, float]]] = {}
    for row in rows(name):
        if series in (None, row["series"]) and is_point(row):
            found.setdefault(row["series"], []).append((_number(_first(row, "x_")), float(_first(row, "y_"))))
    if not found:
        known = ", ".join(dict.fromkeys(row["series"] for row in rows(name)))
        raise UsageError(f"paper/{name}.csv has no series {series!r}; use one of {known}")
    return found


def is_point(row: dict[str, str]) -> bool:
    """Whether it is a measured value; `off_axis` alone is one, outside of the frame."""
    flag = row.get("flag") or ""
    return bool(_first(row, "y_")) and not any(word in flag for word in _NO_POINTS)


def _first(row: dict[str, str], prefix: str) -> str:
    return next(value for name, value in row.items() if name.startswith(prefix))


def _number(text: str) -> X:
    try:
        return float(text)
    except ValueError:
        return text
