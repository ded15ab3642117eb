"""The table that every benchmark prints, and its rows as JSON.

A row compares a value with a reference measured in the same run, the machine's limit or a peer: times and rates differ
from one machine and hour to the next, ratios less so. Knows nothing of what is measured.
"""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_COLUMNS = ("<50", ">10", "<7", ">10", ">7", "<7", "<3")  # alignment and width


@dataclass(frozen=True, slots=True)
class Target:
    """What a ratio (or, without a reference, a value) is to reach: at least or at most a limit."""

    limit: float
    at_least: bool

    def met_by(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.limit:g}"


def at_least(limit: float) -> Target:
    return Target(limit, True)


def at_most(limit: float) -> Target:
    return Target(limit, False)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: name, value and reference in unit, ratio = value / reference, target, and whether it is met; None
    where there is none.
    """

    name: str
    value: float
    unit: str
    reference: float | None
    ratio: float | None
    target: str | None
    ok: bool | None


def row(name: str, value: float, unit: str, reference: float | None = None, target: Target | None = None) -> Row:
    ratio = None if reference is None else value / reference
    ok = None if target is None else target.met_by(value if ratio is None else ratio)
    return Row(name, value, unit, reference, ratio, None if target is None else str(target), ok)


def interleaved(work: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each piece of work, all run in turns after one turn to warm up, so that what else the machine
    does falls on all of them. Work waits for its own results.
    """
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(repeats + 1):
        for name, run in work.items():
            begun = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - begun)
    return {name: statistics.median(values) for name, values in seconds.items()}


def print_heads() -> None:
    _print(("figure", "value", "unit", "reference", "ratio", "target", "ok"))


def print_row(row: Row) -> None:
    """One line of the table, at once, so that a run which is killed has shown what it measured."""
    ok = {None: "", True: "yes", False: "NO"}[row.ok]
    value, reference = ("" if x is None else f"{x:.4g}" for x in (row.value, row.reference))
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    _print((row.name, value, row.unit, reference, ratio, row.target or "", ok))


def write_json(path: Path, rows: Sequence[Row]) -> None:
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def _print(cells: Sequence[str]) -> None:
    columns = zip(cells, _COLUMNS, strict=True)
    print("  ".join(f"{cell:{column}}" for cell, column in columns).rstrip(), flush=True)
