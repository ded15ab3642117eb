"""Report figure 9: loads of prefill and decoding over time, under early rejection and with prediction.

    python experiments/arxiv_fig09.py --traces=traces [--speed=1.5] [--prefill=4] [--decode=8]      # 1 minute

Claim: judged by the decoding load of the moment, admissions make both loads swing in anti-phase, since decoding lags
behind them by a prefill; judged by the load predicted for the end of the prefill, they do not. Expected: a correlation
of both loads below -0.4 with early rejection and above -0.25 with prediction, and half of the prefill load's deviation.
A calm load is no service by itself: with the t_d that is learned here, prediction leaves fewer good requests than early
rejection (2,601 of 4,253), and with a t_d of 40 or 60 s more (7,676 and 8,246; at 60 s loads swing again).

The cluster is one in which loads swing (overload.py). It was chosen on this figure, so all rows are marked fitted; with
profiles `arxiv` and `micro` nothing swings in it. Figure 10, which the report has drawn by hand, is arxiv_fig10.py.
"""

from collections.abc import Iterator, Sequence
from statistics import correlation, fmean, pstdev
from typing import Any

from absl import flags
from clusters import Trace, released
from figure import (
    Headline,
    Sensitivity,
    at_least,
    at_most,
    define_flags,
    parse,
    publish,
    run_script,
    untargeted,
)
from overload import EARLY, EVERY_S, PREDICTED, SWINGING, SWINGING_SPEED, Overloaded, Sample, serve
from reference import rows as paper_rows
from style import line

from mooncake_jax.commands.scheduling_flags import check_above_zero, check_speed

CLAIM = "Early rejection makes the loads of prefill and decoding swing in anti-phase; with prediction they do not."
PROFILES = ("fast25", "arxiv", "micro")
WINDOW_S = 1200.0  # what is drawn
LAG = 2  # samples: 30 s
QUICK_SAMPLES = 4

FLAGS = define_flags("arxiv_fig09", traces=True)
flags.DEFINE_float("speed", SWINGING_SPEED, "replay the trace so many times as fast", flag_values=FLAGS)
flags.DEFINE_integer("prefill", SWINGING["prefill"], "prefill instances", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_integer("decode", SWINGING["decode"], "decoding instances", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_float("decoding_time_s", None, "t_d of the prediction (default: learned)", flag_values=FLAGS)


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    check_speed(FLAGS.speed, "--speed=")
    check_above_zero(FLAGS, "decoding_time_s", unit=" seconds")
    trace = released(FLAGS, "conversation")
    ours = {profile: {name: overloaded(trace, name, profile) for name in (EARLY, PREDICTED)} for profile in PROFILES}
    return publish(
        FLAGS,
        claim=CLAIM,
        rows=[row for profile in PROFILES for row in rows_of(ours[profile], profile)],
        headlines=[one for profile in PROFILES for one in headlines(ours[profile], profile, trace.label)],
        sensitivities=[] if FLAGS.quick else [*sensitivities(trace, ours[PROFILES[0]])],
        lessons=[lesson(*ours[PROFILES[0]].values())],
        draw=lambda *panels: draw(panels, ours[PROFILES[0]]),
        panels=(1, 3),
        size=(11.0, 3.2),
    )


def overloaded(trace: Trace, admission: str, profile: str, **fields: Any) -> Overloaded:
    cluster = {"prefill": FLAGS.prefill, "decode": FLAGS.decode, "decoding_time_s": FLAGS.decoding_time_s}
    return serve(trace.requests(FLAGS.speed), admission, profile, **SWINGING | cluster | fields)


def correlated(samples: Sequence[Sample], lag: int = 0) -> float | None:
    """Of the prefill load with the decoding load so many samples later; None where one of them is constant."""
    prefill = [sample.prefill for sample in samples][: len(samples) - lag]
    decoding = [sample.decoding for sample in samples][lag:]
    if len(prefill) < QUICK_SAMPLES or not pstdev(prefill) or not pstdev(decoding):
        return None
    return correlation(prefill, decoding)


def deviation(samples: Sequence[Sample]) -> float:
    """Of the prefill load."""
    return pstdev([sample.prefill for sample in samples])


def deviation_left(predicted: Sequence[Sample], early: Sequence[Sample]) -> float | None:
    """What prediction leaves of the prefill load's deviation; None where there was none."""
    return deviation(predicted) / deviation(early) if deviation(early) else None


def paper_samples() -> list[Sample]:
    loads = {name: [] for name in ("prefill", "decoding")}
    for row in paper_rows("arxiv_fig09"):
        loads[row["series"]].append(float(row["y_load_percent"]) / 100)
    return [Sample(EVERY_S * place, *both) for place, both in enumerate(zip(*loads.values(), strict=True))]


def headlines(ours: dict[str, Overloaded], profile: str, trace: str) -> Iterator[Headline]:
    paper, early, predicted = paper_samples(), ours[EARLY].steady, ours[PREDICTED].steady
    common = {"profile": profile, "trace": trace, "kind": "fitted"}
    common["note"] = "the sizes of the pools and the load were chosen on this figure"
    if profile == PROFILES[0]:
        common["note"] += ", such that loads swing"
    else:
        common["note"] += f"; with batches as cheap as {profile} has them decoding never nears its SLO: nothing swings"
    target = at_most(-0.4)
    yield Headline(f"correlation of loads, {EARLY}", correlated(paper), correlated(early), target, **common)
    yield Headline(f"correlation of loads, {PREDICTED}", None, correlated(predicted), at_least(-0.25), **common)
    name, ratio = "deviation of prefill load, with prediction over without", deviation_left(predicted, early)
    yield Headline(name, None, ratio, at_most(0.5), **common)
    name = f"correlation with decoding 30 s later, {EARLY}"
    yield Headline(name, correlated(paper, LAG), correlated(early, LAG), untargeted(), **common)
    for pool in ("prefill", "decoding"):
        theirs, found = ([getattr(sample, pool) for sample in samples] for samples in (paper, early))
        yield Headline(f"mean {pool} load, {EARLY}", fmean(theirs), fmean(found), untargeted(), **common)
        yield Headline(f"deviation of {pool} load, {EARLY}", pstdev(theirs), pstdev(found), untargeted(), **common)
    if profile == PROFILES[0]:
        common["note"] += f"; {lesson(*ours.values())}"
    for name, served in ours.items():
        yield Headline(f"requests within both SLOs, {name}", None, served.good(), untargeted(), **common)


def lesson(early: Overloaded, predicted: Overloaded) -> str:
    return (
        f"by the t_d that it learns prediction leaves {predicted.good()} good requests, and early rejection "
        f"{early.good()}: how long decoding is taken to last decides (see the sweep of t_d)"
    )


def sensitivities(trace: Trace, ours: dict[str, Overloaded]) -> Iterator[Sensitivity]:
    """Of the correlation, and of what prediction does to the prefill load's deviation."""
    name, profile = f"correlation of loads, {EARLY}", PROFILES[0]
    for assumption, field, values in (
        ("prefill instances", "prefill", (3, 4, 5, 6, 8)),
        ("decoding instances judge again", "recheck", (False, True)),
    ):
        tried = [correlated(overloaded(trace, EARLY, profile, **{field: value}).steady) for value in values]
        yield Sensitivity(assumption, values, name, tried)
    times = (20.0, 40.0, 60.0)
    tried = [overloaded(trace, PREDICTED, profile, decoding_time_s=seconds) for seconds in times] + [ours[PREDICTED]]
    values = [*times, "learned"]
    results = [correlated(served.steady) for served in tried]
    yield Sensitivity("t_d, s", values, f"correlation of loads, {PREDICTED}", results)
    results = [deviation_left(served.steady, ours[EARLY].steady) for served in tried]
    yield Sensitivity("t_d, s", values, "deviation of prefill load, with prediction over without", results)
    results = [served.good() for served in tried]
    yield Sensitivity("t_d, s", values, f"requests within both SLOs, {PREDICTED}", results)


def rows_of(ours: dict[str, Overloaded], profile: str) -> Iterator[dict[str, Any]]:
    for name, served in ours.items():
        for sample in served.samples:
            loads = {"prefill_load_of_slo": sample.prefill, "decoding_load_of_slo": sample.decoding}
            yield {"profile": profile, "admission": name, "time_s": sample.seconds} | loads


def draw(panels, ours: dict[str, Overloaded]) -> None:
    first, second, third = panels
    shown = {f"ours, {name}, profile {PROFILES[0]}": served.samples for name, served in ours.items()}
    shown = {title: [one for one in samples if one.seconds <= WINDOW_S] for title, samples in shown.items()}
    for axes, (title, samples) in zip((first, third), shown.items(), strict=True):
        draw_loads(axes, samples, title)
    draw_loads(second, paper_samples(), "report figure 9: early rejection", paper=True)
    first.legend(loc="upper center", ncols=2)


def draw_loads(axes, samples: Sequence[Sample], title: str, paper: bool = False) -> None:
    for place, pool in enumerate(("prefill", "decoding")):
        points = [(sample.seconds, 100 * getattr(sample, pool)) for sample in samples]
        line(axes, points, pool, place, paper=paper, markers=paper)
    axes.set(title=title, xlabel="time, s", ylabel="load, % of its SLO", ylim=(0, 140))


if __name__ == "__main__":
    run_script(main)
