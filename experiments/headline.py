"""Headline numbers of a figure: the paper's, ours, how near they were to come, and how far assumptions move them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Value = float | int | str | None


@dataclass(frozen=True, slots=True)
class Tolerance:
    """text: as the fidelity table shows it; holds: of the paper's number and ours, None where there is no target."""

    text: str
    holds: Callable[[Any, Any], bool] | None


def share(most: float) -> Tolerance:
    """Ours is off by at most this share of the paper's."""
    return Tolerance(f"within {100 * most:g} %", lambda paper, ours: abs(ours - paper) <= most * abs(paper))


def points(most: float) -> Tolerance:
    """Ours is off by at most so much, in the number's own unit."""
    return Tolerance(f"within {most:g}", lambda paper, ours: abs(ours - paper) <= most)


def between(least: float, most: float) -> Tolerance:
    return Tolerance(f"{least:g} to {most:g}", lambda paper, ours: least <= ours <= most)


def at_least(least: float) -> Tolerance:
    return Tolerance(f"at least {least:g}", lambda paper, ours: ours >= least)


def at_most(most: float) -> Tolerance:
    return Tolerance(f"at most {most:g}", lambda paper, ours: ours <= most)


def same() -> Tolerance:
    """Equal, as texts such as an order are."""
    return Tolerance("the same", lambda paper, ours: ours == paper)


def untargeted() -> Tolerance:
    return Tolerance("no target", None)


@dataclass(frozen=True, slots=True)
class Headline:
    """A row of the fidelity table.

    name: what is compared, with its unit; paper: None where it gives none; ours: None where there is nothing to
    measure, which meets no target; profile: of the cost model, by name, or what was measured; kind: "fitted" where a
    constant was chosen on this very figure; note: a sentence on why they differ, and what decides it.
    """

    name: str
    paper: Value
    ours: Value
    tolerance: Tolerance
    profile: str
    trace: str
    kind: Literal["predicted", "fitted"]
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's; None where either is no number, or the paper's is 0."""
        if not _is_number(self.paper) or not _is_number(self.ours) or self.paper == 0:
            return None
        return self.ours / self.paper

    @property
    def ok(self) -> bool | None:
        """None without a target."""
        if self.tolerance.holds is None:
            return None
        return self.ours is not None and self.tolerance.holds(self.paper, self.ours)

    def row(self, where: str) -> dict[str, Any]:
        """As in fidelity.json. where: the figure."""
        fields = {"name": self.name, "where": where, "paper": self.paper, "ours": self.ours, "ratio": self.ratio}
        fields |= {"tolerance": self.tolerance.text, "ok": self.ok, "kind": self.kind}
        return fields | {"profile": self.profile, "trace": self.trace, "note": self.note}


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """How far a headline number moves with one assumption of ours: `results` of it, in the order of `values`."""

    assumption: str
    values: Sequence[Value]
    headline: str
    results: Sequence[Value]

    def __post_init__(self):
        if len(self.values) != len(self.results):
            raise ValueError(f"{self.assumption}: {len(self.values)} values, but {len(self.results)} results")

    def row(self) -> dict[str, Any]:
        fields = {"assumption": self.assumption, "values": list(self.values)}
        return fields | {"headline": self.headline, "results": list(self.results)}


def _is_number(value: Value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
