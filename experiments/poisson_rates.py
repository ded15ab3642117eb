"""P90 TTFT and TBT of three small clusters by request rate, over their SLOs: what report figures 11 and 12 share.

The SLO of TTFT is ten times, and that of TBT five times, what a request takes at the lowest rate. The report does not
say whose: its lowest points average 0.1 and 0.2 over the three systems, so it is their mean. TBT is the mean gap of a
request. Prefixes are matched as requests arrive and not again as their prefill starts (SimulationConfig.rematch). Knows
nothing of single figures.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any

from clusters import run
from documents import asked
from reference import rows as paper_rows
from style import line

from mooncake_jax.metrics import mean, percentile
from mooncake_jax.request import Outcome
from mooncake_jax.sched.cost import CostModel

SYSTEMS: Mapping[str, Mapping[str, Any]] = {
    "Mooncake-[3P+1D]": {"prefill": 3, "decode": 1},
    "Mooncake-[2P+2D]": {"prefill": 2, "decode": 2},
    "vLLM-[4M]": {"coupled": 4},
}
PROFILES = ("arxiv", "micro")  # the first is drawn
COSTS = ("micro", "arxiv", "fast25")  # profiles that differ in what a request more adds to a step
SLO_TIMES = {"ttft": 10, "tbt": 5}
DRAWN = 1.2  # the report draws what is above there, so its crossings are read off lines to there, and so are ours
QUICK_RATES, QUICK_REQUESTS = 2, 30

Ratios = dict[float, dict[str, float]]  # by rate: of "ttft" and "tbt", P90 over its SLO
Found = dict[str, list[Ratios]]  # by system, one of each seed


@dataclass(frozen=True)
class Workload:
    """requests at each of the rates, of `name` (workload/poisson.py), asked as documents.py has it. paper: its CSVs;
    vllm: the coupled_mode of vLLM.
    """

    name: str
    paper: str
    rates: tuple[float, ...]
    requests: int
    questions: int
    at_once: int
    vllm: str

    def quick(self) -> "Workload":
        fields = {**vars(self), "rates": self.rates[:QUICK_RATES], "requests": QUICK_REQUESTS}
        return Workload(**fields)


def measure(
    workload: Workload,
    cost: str | CostModel,
    seeds: Iterable[int],
    systems: Iterable[str] = SYSTEMS,
    **fields: Any,
) -> Found:
    """fields: of SimulationConfig, for all systems. Rates above the first one that is off the axes are not tried."""
    found: Found = {system: [] for system in systems}
    for seed in seeds:
        p90 = {system: partial(_p90, workload, cost, seed, system, fields) for system in SYSTEMS}
        lowest = {system: of(workload.rates[0]) for system, of in p90.items()}
        limits = {
            what: times * mean([seconds[what] for seconds in lowest.values()]) for what, times in SLO_TIMES.items()
        }
        for system, ratios in found.items():
            measured = chain([lowest[system]], map(p90[system], workload.rates[1:]))  # as they are asked for
            ratios.append(dict(_until_off_the_axes(zip(workload.rates, measured, strict=True), limits)))
    return found


def _until_off_the_axes(
    measured: Iterable[tuple[float, Mapping[str, float]]], limits: Mapping[str, float]
) -> Iterator[tuple[float, dict[str, float]]]:
    for rate, seconds in measured:
        ratios = {what: seconds[what] / limit for what, limit in limits.items()}
        yield rate, ratios
        if max(ratios.values()) > DRAWN:
            return


def _p90(
    workload: Workload, cost: str | CostModel, seed: int, system: str, fields: Mapping, rate: float
) -> dict[str, float]:
    trace = asked(workload.name, workload.requests, rate, seed, workload.questions, workload.at_once)
    own = {"coupled_mode": workload.vllm} if "coupled" in SYSTEMS[system] else {"rematch": False}
    outcomes = run(trace.requests(), cost, admission="none", **SYSTEMS[system] | own | fields).outcomes
    return {what: percentile(map(of, outcomes), 90) for what, of in (("ttft", _ttft), ("tbt", _tbt))}


def _ttft(outcome: Outcome) -> float:
    return outcome.ttft_s


def _tbt(outcome: Outcome) -> float:
    return outcome.tbt_mean_s or 0.0  # of a single token: none


def papers_rates(paper: str) -> tuple[float, ...]:
    """All that the report tried of a workload, by its CSVs' name."""
    return tuple(sorted({float(row["x_request_rate_req_per_s"]) for row in paper_rows(f"{paper}_ttft")}))


def paper_points(workload: Workload, what: str) -> dict[str, list[tuple[float, float]]]:
    """By system, (rate, ratio) as drawn: what is above the picture lies on its edge."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in paper_rows(f"{workload.paper}_{what}"):
        rate, ratio = float(row["x_request_rate_req_per_s"]), float(row[f"y_p90_{what}_over_slo"])
        found.setdefault(row["series"], []).append((rate, min(ratio, DRAWN)))
    return found


def papers_rate(workload: Workload, system: str) -> dict[str, str]:
    """The row of the highest rates that the report's figures 11 and 12 have within both SLOs."""
    name = workload.paper.split("_", 2)[2]
    rows = paper_rows("arxiv_fig11_12_max_rates")
    return next(row for row in rows if (row["workload"], row["series"]) == (name, system))


def label(workload: Workload, seeds: Sequence[int]) -> str:
    """As the fidelity table names what was generated."""
    return f"{workload.name}, generated, {len(seeds)} seed{'s' if len(seeds) > 1 else ''}"


def rows_of(workload: Workload, profile: str, found: Found, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """For the CSV."""
    for system, by_seed in found.items():
        for seed, ratios in zip(seeds, by_seed, strict=True):
            for rate, both in ratios.items():
                about = {"source": "ours", "profile": profile, "workload": workload.name, "system": system}
                yield about | {"seed": seed, "rate_req_per_s": rate} | {f"p90_{w}_over_slo": r for w, r in both.items()}


def crossing(ratios: Ratios) -> tuple[float, str]:
    """The rate up to which both keep their SLOs, on straight lines between those tried, and which breaks it; the
    highest one, and "none", where no rate does.
    """
    found = {what: _crossing([(rate, both[what]) for rate, both in ratios.items()]) for what in SLO_TIMES}
    first = min(found, key=found.__getitem__)
    return (found[first], first.upper()) if math.isfinite(found[first]) else (max(ratios), "none")


def _crossing(points: Sequence[tuple[float, float]]) -> float:
    if points[0][1] > 1:
        return points[0][0]
    for (before, low), (after, high) in pairwise(points):
        if high > 1:
            return before + (after - before) * (1 - low) / (min(high, DRAWN) - low)
    return math.inf


def largest_kept(ratios: Ratios) -> float:
    """The highest rate tried at which, and below which, both keep their SLOs; 0 for none."""
    kept = 0.0
    for rate, both in ratios.items():
        if max(both.values()) > 1:
            break
        kept = rate
    return kept


def draw_all(panels: Iterable[Any], ours: Mapping[Workload, Found]) -> None:
    """A panel for each workload's TTFT and one for its TBT."""
    places = iter(panels)
    for workload, found in ours.items():
        for what in SLO_TIMES:
            _draw_ratios(next(places), workload, what, found)


def _draw_ratios(axes: Any, workload: Workload, what: str, found: Found) -> None:
    """Means of the seeds, with their least and greatest, and the paper's points, capped ones too."""
    theirs = paper_points(workload, what)
    for place, (system, by_seed) in enumerate(found.items()):
        rates = [rate for rate in workload.rates if any(rate in ratios for ratios in by_seed)]
        each = [list(_drawn(by_seed, rate, what)) for rate in rates]
        means = [(rate, mean(values)) for rate, values in zip(rates, each, strict=True)]
        line(axes, means, system, place, spread=[(min(values), max(values)) for values in each])
        line(axes, theirs[system], f"{system}, paper", place, paper=True)
    axes.axhline(1, color="black", linewidth=0.6)
    axes.set(ylim=(0, DRAWN + 0.05), xlabel="requests/s", ylabel=f"P90 {what.upper()} / SLO, ours: mean of seeds")
    axes.set_title(f"{workload.name}, profile {PROFILES[0]}")


def _drawn(by_seed: Sequence[Ratios], rate: float, what: str) -> Iterator[float]:
    """Of each seed. What is above the picture counts as its edge, as the report's does, and stays there."""
    for ratios in by_seed:
        if rate in ratios:
            yield min(ratios[rate][what], DRAWN)
        elif ratios[max(ratios)][what] > DRAWN:
            yield DRAWN
