"""Report figure 10: both loads at four successive stages, with early rejection and with prediction.

    python experiments/arxiv_fig10.py --traces=traces      # 1 minute

Claim: with early rejection the loads of prefill and decoding take turns: one is high where the other is low; with
prediction neither swings so far. The report has drawn this by hand, so its points illustrate and measure nothing. Ours
are measured, on the cluster of figure 9 (overload.py): a stage is where the decoding load turns, and the four stages
are those successive ones between which it swings farthest, from a low one on, as the report draws them. Expected: with
prediction half the swing or less, with profile `fast25`; with `arxiv` and `micro` decoding never nears its SLO, and
prediction changes nothing. With 6 prefill instances early rejection itself swings half as far, and prediction a third
farther than that; where decoding instances judge again, prediction changes nothing. The cluster was chosen on these two
figures, so all rows are marked fitted.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

from clusters import released
from figure import Headline, Sensitivity, at_most, define_flags, parse, publish, run_script, untargeted
from overload import EARLY, PREDICTED, SWINGING, SWINGING_SPEED, Sample, serve
from reference import rows as paper_rows
from style import line

from mooncake_jax.request import Request

CLAIM = "With early rejection the loads of prefill and decoding take turns; with prediction neither swings so far."
PROFILES = ("fast25", "arxiv", "micro")
STAGES = 4
RATIO = "change of decoding load from stage to stage, with prediction over without"
SERIES = {EARLY: "EarlyRejection", PREDICTED: "EarlyRejectionPrediction"}  # as the paper's points name them
NOTE = "the cluster is that of figure 9, {}; the report's points are drawn by hand"
SWINGS = f"chosen such that loads swing with {PROFILES[0]}"
CALM = f"{SWINGS}; with batches as cheap as here decoding never nears its SLO"

FLAGS = define_flags("arxiv_fig10", traces=True)


class Stage(NamedTuple):
    """Loads at a moment; 1 is what its SLO allows."""

    prefill: float
    decoding: float


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    trace = released(FLAGS, "conversation")
    requests = trace.requests(SWINGING_SPEED)
    ours = {profile: both(requests, profile) for profile in PROFILES}
    paper = {name: drawn(name) for name in SERIES}
    return publish(
        FLAGS,
        claim=CLAIM,
        rows=[
            {"profile": profile, "admission": name, "stage": number}
            | {f"{pool}_load_of_slo": load for pool, load in stage._asdict().items()}
            for profile, by_name in ours.items()
            for name, found in by_name.items()
            for number, stage in enumerate(found, 1)
        ],
        headlines=[one for profile in PROFILES for one in headlines(ours[profile], paper, profile, trace.label)],
        sensitivities=[] if FLAGS.quick else [*sensitivities(requests, ours[PROFILES[0]])],
        draw=lambda *panels: draw(panels, ours[PROFILES[0]], paper),
        panels=(1, 2),
        size=(8.0, 3.4),
    )


def served(requests: Sequence[Request], admission: str, profile: str, **fields: Any) -> list[Stage]:
    """fields: of SimulationConfig, instead of figure 9's."""
    return stages(serve(requests, admission, profile, **SWINGING | fields).steady)


def both(requests: Sequence[Request], profile: str, **fields: Any) -> dict[str, list[Stage]]:
    return {name: served(requests, name, profile, **fields) for name in SERIES}


def stages(samples: Sequence[Sample]) -> list[Stage]:
    """At the turns of the decoding load, from a low one on, those successive ones between which it swings farthest."""
    turns = [samples[0]]
    for before, sample, after in zip(samples, samples[1:], samples[2:], strict=False):
        if (sample.decoding - before.decoding) * (after.decoding - sample.decoding) < 0:
            turns.append(sample)
    lows = [place for place, (one, other) in enumerate(pairwise(turns)) if one.decoding < other.decoding]
    windows = [turns[place : place + STAGES] for place in lows if place + STAGES <= len(turns)]
    return [Stage(sample.prefill, sample.decoding) for sample in max(windows or [turns[:STAGES]], key=swing)]


def swing(found: Sequence[Stage] | Sequence[Sample]) -> float:
    """Mean change of the decoding load from a stage to the next."""
    return fmean([abs(b.decoding - a.decoding) for a, b in zip(found, found[1:], strict=False)] or [0.0])


def swing_left(found: dict[str, list[Stage]]) -> float | None:
    """What prediction leaves of it; None where nothing swings."""
    return swing(found[PREDICTED]) / swing(found[EARLY]) if swing(found[EARLY]) else None


def sensitivities(requests: Sequence[Request], ours: dict[str, list[Stage]]) -> Iterator[Sensitivity]:
    """By what figure 9 has, with profile PROFILES[0]."""
    swings = f"change of decoding load from stage to stage, {EARLY}"
    for assumption, field, other in (
        ("prefill instances", "prefill", 6),
        ("decoding instances judge again", "recheck", True),
    ):
        values, tried = (SWINGING[field], other), (ours, both(requests, PROFILES[0], **{field: other}))
        yield Sensitivity(assumption, values, swings, [swing(found[EARLY]) for found in tried])
        yield Sensitivity(assumption, values, RATIO, [swing_left(found) for found in tried])
    times = (20.0, 40.0, 60.0)
    predicted = [served(requests, PREDICTED, PROFILES[0], decoding_time_s=seconds) for seconds in times]
    ratios = [swing_left(ours | {PREDICTED: found}) for found in (*predicted, ours[PREDICTED])]
    yield Sensitivity("t_d, s", (*times, "learned"), RATIO, ratios)


def drawn(name: str) -> list[Stage]:
    """The report's, after admission."""
    by_kind: dict[str, list[float]] = {}
    for row in paper_rows("arxiv_fig10_schematic"):
        by_kind.setdefault(row["series"], []).append(float(row["y_illustrative_load_fraction"]))
    loads = (by_kind[f"{SERIES[name]}:{kind}"] for kind in ("prefill_load_after_admission", "decoding_load"))
    return [Stage(*both) for both in zip(*loads, strict=True)]


def headlines(
    ours: dict[str, list[Stage]], paper: dict[str, list[Stage]], profile: str, trace: str
) -> Iterator[Headline]:
    common = {"profile": profile, "trace": trace, "kind": "fitted"}
    common["note"] = NOTE.format(SWINGS if profile == PROFILES[0] else CALM)
    for name in SERIES:
        title = f"change of decoding load from stage to stage, {name}"
        yield Headline(title, swing(paper[name]), swing(ours[name]), untargeted(), **common)
    yield Headline(RATIO, swing_left(paper), swing_left(ours), at_most(0.5), **common)
    title = f"stages in which one load is above its mean and the other below, {EARLY}"
    yield Headline(title, opposed(paper[EARLY]), opposed(ours[EARLY]), untargeted(), **common)


def opposed(found: Sequence[Stage]) -> int:
    prefill, decoding = (fmean(loads) for loads in zip(*found, strict=True))
    return sum((stage.prefill > prefill) != (stage.decoding > decoding) for stage in found)


def draw(panels, ours: dict[str, list[Stage]], paper: dict[str, list[Stage]]) -> None:
    for axes, name in zip(panels, SERIES, strict=True):
        for whose, found in (("ours", ours[name]), ("drawn in the report", paper[name])):
            for place, pool in enumerate(Stage._fields):
                points = [(number, 100 * getattr(stage, pool)) for number, stage in enumerate(found, 1)]
                line(axes, points, f"{pool}, {whose}", place, paper=whose != "ours")
        axes.set(title=f"{name}, profile {PROFILES[0]}", xlabel="stage", ylabel="load, % of its SLO", ylim=(0, 140))
        axes.set_xticks(range(1, STAGES + 1))
        axes.legend(ncols=2)


if __name__ == "__main__":
    run_script(main)
