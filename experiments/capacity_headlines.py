"""The headline numbers of FAST25 figures 1, 6 and 7: shares within 100, 200 and 300 ms, gains, and the order of two."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from capacity_measures import LIMITS_MS, Measured
from figure import Headline, between, points, same, untargeted
from headline import Tolerance
from reference import rows as paper_rows
from systems import CALIBRATIONS, CHUNKED, MICRO, MOONCAKE, NAMED, PREFIX, SYSTEMS, VLLM, request_ms

HASHED = f"{PREFIX} with hashing on the host"  # a system of ours: with what hashing its blocks takes
BELOW, ABOVE = "below", "not below"
NOTES = {
    NAMED: {
        MOONCAKE: f"{request_ms(SYSTEMS[MOONCAKE].profile):g} ms a request in a step are chosen on figure 1 at 100 ms",
        VLLM: f"{request_ms(SYSTEMS[VLLM].profile):g} ms a request, chosen on figure 1, who chooses the node, and "
        "prefill's speed decide (sensitivities)",
        PREFIX: "what its host takes is left out, as if prefix caching cost nothing: see the rows with it",
        CHUNKED: "tokens of a chunk decide: 1,792 are chosen on figure 1; 512 would bring nearly all within 200 ms",
        HASHED: "the host's processor and vLLM's version decide (sensitivities); looking for what to evict counts from "
        "the start here, while a cache takes a while to fill",
    },
    MICRO: {
        MOONCAKE: f"a request more costs a step {request_ms(MICRO):g} ms: no batch comes near the limits",
        VLLM: "steps are short, so only the prompts of others make long gaps",
        PREFIX: "steps are short; what its host takes is left out",
        CHUNKED: "steps are short, and a chunk costs nothing beside its tokens",
    },
}

GAIN_NOTES = {
    NAMED: "follows from the two systems' shares: above all from vLLM's, which it is divided by",
    MICRO: "steps are short, so vLLM serves far more in time than the paper's does, which leaves less to gain",
}


@dataclass(frozen=True)
class Figure:
    """workload: as systems.workloads names it; series: as the paper's thresholds do; tolerances: by system, in points;
    gains: per cent that Mooncake is to serve more than `over`, by limit; fitted: whether the named profiles were chosen
    on it; varies: the systems of which assumptions are varied, beside the host's time.
    """

    workload: str
    series: str
    claim: str
    over: str
    tolerances: Mapping[str, float] = field(default_factory=dict)
    gains: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    fitted: bool = False
    varies: tuple[str, ...] = tuple(SYSTEMS)


Found = Mapping[tuple[str, str], Sequence[Measured]]  # by calibration and system
Paper = Mapping[tuple[str, int], dict[str, str]]  # rows of the thresholds, by system and limit


def limits_of_paper(series: str) -> Paper:
    found = (row for row in paper_rows("fast25_fig01_06_07_thresholds") if row["workload"] == series)
    return {(row["series"], int(row["x_tbt_threshold_ms"])): row for row in found}


def share_of(found: Found, calibration: str, system: str, limit_ms: int) -> float:
    """Per cent within it, the mean of all traces."""
    return fmean(one.within(limit_ms) for one in found[calibration, system])


def paper_share(theirs: Paper, system: str, limit_ms: int) -> float:
    return float(theirs[PREFIX if system == HASHED else system, limit_ms]["y_request_capacity_percent"])


def all_headlines(
    figure: Figure, found: Found, theirs: Paper, labels: Mapping[str, str], slow: Measured
) -> list[Headline]:
    """labels: of the traces, by calibration. slow: of the first trace, prefix caching on the slowest host."""
    made = [*share_headlines(figure, found, theirs, labels)]
    for calibration in CALIBRATIONS:
        made += gain_headlines(figure, found, theirs, labels[calibration], calibration)
    return [*made, *order_headlines(figure, found, theirs, labels[NAMED], slow)]


def share_headlines(figure: Figure, found: Found, theirs: Paper, labels: Mapping[str, str]) -> list[Headline]:
    made = []
    for calibration, system in found:
        most = figure.tolerances.get(PREFIX if system == HASHED else system)
        common = {"tolerance": untargeted() if most is None else points(most), "trace": labels[calibration]}
        common |= {"profile": profile_of(system, calibration)}
        common |= {"kind": kind(figure, calibration), "note": NOTES[calibration][system]}
        for limit in LIMITS_MS:
            expected = paper_share(theirs, system, limit)
            ours = share_of(found, calibration, system, limit)
            made.append(Headline(f"{system} within {limit} ms, %", expected, ours, **common))
    return made


def gain_headlines(figure: Figure, found: Found, theirs: Paper, label: str, calibration: str) -> list[Headline]:
    """Over the system that the paper's printed gains are over, and truncated as they are; and over our best one."""
    names = [system for c, system in found if c == calibration and system != MOONCAKE]
    common = {"profile": profiles(figure.over, calibration), "trace": label, "kind": kind(figure, calibration)}
    made = []
    cause = GAIN_NOTES[calibration]
    for limit in LIMITS_MS:
        printed = int(theirs[figure.over, limit]["printed_gain_percent"])
        shares = {name: share_of(found, calibration, name, limit) for name in (MOONCAKE, *names)}
        gained = gain(shares[MOONCAKE], shares[figure.over])
        wanted: Tolerance = between(*figure.gains[limit]) if limit in figure.gains else untargeted()
        made.append(
            Headline(f"gain over {figure.over} at {limit} ms, %", printed, gained, wanted, note=cause, **common)
        )
        best = max(names, key=shares.__getitem__)
        note = f"here that is {best}; in the paper {figure.over}"
        name = f"gain over the best vLLM at {limit} ms, %"
        ours = gain(shares[MOONCAKE], shares[best])
        made.append(Headline(name, printed, ours, untargeted(), note=note, **common))
    return made


def order_headlines(figure: Figure, found: Found, theirs: Paper, label: str, slow: Measured) -> list[Headline]:
    """Whether prefix caching is below plain vLLM, at each limit."""
    expected = order(lambda limit: paper_share(theirs, PREFIX, limit), lambda limit: paper_share(theirs, VLLM, limit))
    made = []
    notes = {
        PREFIX: "what its host takes is left out here: so it can only gain by reuse",
        HASHED: "what its host takes, timed apart from these figures on a core of today, against what reuse gains; on "
        f"a host 3 times as slow {slow_order(slow, found[NAMED, VLLM][0])} (sensitivities). Nobody outside knows "
        "how slow the paper's hosts were",
    }
    for system, note in notes.items():
        ours = order(lambda ms, of=system: share_of(found, NAMED, of, ms), lambda ms: share_of(found, NAMED, VLLM, ms))
        shown = profile_of(system, NAMED)
        wanted = same() if figure.tolerances else untargeted()
        name = f"{system}, against plain vLLM at {', '.join(map(str, LIMITS_MS))} ms"
        # Each rests on plain vLLM's cost of a request, chosen on figure 1.
        made.append(Headline(name, expected, ours, wanted, shown, label, kind(figure, NAMED), note))
    return made


def order(prefix: Callable[[int], float], plain: Callable[[int], float]) -> str:
    """Of the shares by limit."""
    return ", ".join(BELOW if prefix(limit) < plain(limit) else ABOVE for limit in LIMITS_MS)


def slow_order(slow: Measured, plain: Measured) -> str:
    """Of the same trace."""
    prefixes, plains = (" / ".join(f"{of.within(limit):.0f}" for limit in LIMITS_MS) for of in (slow, plain))
    return f"it would be {order(slow.within, plain.within)}: {prefixes} % against plain vLLM's {plains} %"


def gain(ours: float, theirs: float) -> int | None:
    """Per cent, truncated; None over nothing."""
    return int(100 * (ours / theirs - 1)) if theirs else None


def kind(figure: Figure, calibration: str) -> Literal["predicted", "fitted"]:
    return "fitted" if figure.fitted and calibration == NAMED else "predicted"


def profile_of(system: str, calibration: str) -> str:
    return f"{SYSTEMS[PREFIX].profile}, hashing" if system == HASHED else SYSTEMS[system].profile_in(calibration)


def profiles(system: str, calibration: str) -> str:
    """Of Mooncake and a vLLM."""
    return MICRO if calibration == MICRO else f"{SYSTEMS[MOONCAKE].profile}, {SYSTEMS[system].profile}"
