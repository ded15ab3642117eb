"""The file of a sweep: which runs of `simulate` it stands for, in which order (docs/sweeps.md).

`[base]` holds flags that all runs share, `[axes]` flags with a list of values each, of which every combination runs,
and each `[[cases]]` flags that change together; every case runs with every combination. `[goodput]` says how `sweep
--goodput` searches. Knows nothing of which flags there are.
"""

import itertools
import math
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mooncake_jax.commands.scheduling_flags import check_speed
from mooncake_jax.errors import UsageError

Flags = dict[str, str]  # values by name, as a command line has them
_TABLES = ("base", "axes", "cases", "goodput")
_LEAST_TOLERANCE = 0.001
_MOST_RUNS = 100_000


@dataclass(frozen=True, slots=True)
class GoodputSearch:
    """attainment: the share of requests that are to meet their SLO; lowest, highest: replay speeds between which the
    highest that keeps it is sought; tolerance: how far the two ends of the answer may lie apart, as a share.
    """

    attainment: float = 0.9
    lowest: float = 0.1
    highest: float = 16.0
    tolerance: float = 0.02


@dataclass(frozen=True, slots=True)
class SweepFile:
    """Flag values as text. cases: one without flags where the file names none."""

    path: Path
    base: Flags
    axes: dict[str, tuple[str, ...]]
    cases: tuple[Flags, ...]
    goodput: GoodputSearch

    @property
    def columns(self) -> tuple[str, ...]:
        """The flags that differ from run to run: those of the cases, then the axes."""
        return (*self.cases[0], *self.axes)

    def combinations(self) -> list[Flags]:
        """The values of `columns`, in the order of the file; the last axis changes fastest."""
        grid = [dict(zip(self.axes, values)) for values in itertools.product(*self.axes.values())]
        return [case | point for case in self.cases for point in grid]

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "path"}


def read_sweep(path: Path) -> SweepFile:
    """Raises UsageError naming the file and the key."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); name the TOML file of a sweep") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not TOML ({error}); correct it") from None
    for name in tables:
        if name not in _TABLES:
            raise UsageError(f"{path}: {name}: a sweep has {', '.join(_TABLES)} and no more; see docs/sweeps.md")
    base = _flags(path, "base", tables.get("base", {}))
    axes = {name: _axis(path, name, values) for name, values in _table(path, "axes", tables.get("axes", {})).items()}
    file = SweepFile(path, base, axes, _cases(path, tables.get("cases", [{}])), _goodput(path, tables))
    _check_names(file)
    runs = len(file.cases) * math.prod(map(len, axes.values()))
    if runs > _MOST_RUNS:
        raise UsageError(f"{path}: {runs} combinations; a sweep has at most {_MOST_RUNS}: give fewer values")
    return file


def _table(path: Path, name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{path}: {name} = {value!r}: it must be a table, [{name}], of flags")
    return value


def _flags(path: Path, name: str, table: Any) -> Flags:
    return {flag: _text(path, f"{name}.{flag}", value) for flag, value in _table(path, name, table).items()}


def _text(path: Path, key: str, value: Any) -> str:
    """As on a command line."""
    match value:
        case bool():
            return str(value).lower()
        case str() | int() | float():
            return str(value)
        case list() if all(isinstance(part, str) for part in value):
            return ",".join(value)
    raise UsageError(f"{path}: {key} = {value!r}: a flag's value is a text, a number, true, false, or a list of texts")


def _axis(path: Path, name: str, values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not values:
        raise UsageError(f"{path}: axes.{name} = {values!r}: an axis is a list of at least one value")
    texts = tuple([_text(path, f"axes.{name}", value) for value in values])
    twice = next((text for place, text in enumerate(texts) if text in texts[:place]), None)
    if twice is not None:
        raise UsageError(f"{path}: axes.{name} names {twice!r} twice; name it once")
    return texts


def _cases(path: Path, cases: Any) -> tuple[Flags, ...]:
    if not isinstance(cases, list) or not cases or not all(isinstance(case, dict) for case in cases):
        raise UsageError(f"{path}: cases: write each as a table of its own, [[cases]], of flags")
    found = tuple([_flags(path, f"cases[{place}]", case) for place, case in enumerate(cases)])
    for place, case in enumerate(found):
        if case.keys() != found[0].keys():
            raise UsageError(
                f"{path}: cases[{place}] sets {_names(case)} and the first case {_names(found[0])}: all cases must set "
                "the same flags"
            )
        if case in found[:place]:
            raise UsageError(f"{path}: cases[{place}] is the same as an earlier case; remove it")
    return tuple([{name: case[name] for name in found[0]} for case in found])


def _names(case: Flags) -> str:
    return ", ".join(case) or "nothing"


def _check_names(file: SweepFile) -> None:
    """Each flag has one place."""
    for table, names in (("axes", file.axes), ("cases", file.cases[0])):
        for name in names:
            if name in file.base or (table == "cases" and name in file.axes):
                other = "base" if name in file.base else "axes"
                raise UsageError(f"{file.path}: {name} is in {other} and in {table}; keep one")


def _goodput(path: Path, tables: dict[str, Any]) -> GoodputSearch:
    table = _table(path, "goodput", tables.get("goodput", {}))
    for name, value in table.items():
        if name not in GoodputSearch.__dataclass_fields__:
            raise UsageError(f"{path}: goodput.{name}: use {', '.join(GoodputSearch.__dataclass_fields__)}")
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise UsageError(f"{path}: goodput.{name} = {value!r}: it must be a number above 0")
    search = GoodputSearch(**{name: float(value) for name, value in table.items()})
    if search.attainment > 1:
        raise UsageError(f"{path}: goodput.attainment = {search.attainment}: it is a share of requests, at most 1")
    for name in ("lowest", "highest"):
        check_speed(getattr(search, name), f"{path}: goodput.{name} = ")
    if not search.lowest < search.highest:
        raise UsageError(f"{path}: goodput.lowest = {search.lowest}: it must be below highest, {search.highest}")
    if search.tolerance < _LEAST_TOLERANCE:
        raise UsageError(f"{path}: goodput.tolerance = {search.tolerance}: it must be at least {_LEAST_TOLERANCE}")
    return search
