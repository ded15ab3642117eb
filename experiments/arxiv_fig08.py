"""Report figure 8: TTFT by scheduler, under a load at which choosing well decides.

    python experiments/arxiv_fig08.py --traces=traces [--speed=1.8] [--trace=FILE] [--seeds=0,1,2,3]     # 3 minutes

Claim: KVCache-centric scheduling has the least TTFT, then cache-aware, then load balancing, then random; the first two
keep a mean below the SLO of 30 s. The report's own trace is not at hand: FAST25's conversation trace is served 1.8
times as fast on 8 prefill and 8 decoding instances, nothing is rejected; beside it, twice as fast, surrogates of the
report's. Expected: that order, and both cache-aware means below 30 s. The load was chosen on this figure such that they
are, so all rows of that trace are marked fitted. The means themselves are no target: at twice the speed cache-aware has
93 s, and with prefill 10 % slower 82 s (with 20 %, neither is below 30 s). On the surrogates all are overloaded (means
of 162, 235, 337 and 349 s), in the same order. Random is of all seeds together.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags
from boxes import Box, box_of
from clusters import Trace, completed, released, run
from figure import Headline, Sensitivity, at_most, define_flags, parse, publish, run_script, same, seeds_of, untargeted
from reference import points as papers
from style import box
from surrogates import described, report_traces
from systems import with_prefill_factor

from mooncake_jax.commands.scheduling_flags import check_speed
from mooncake_jax.metrics import mean
from mooncake_jax.request import Outcome
from mooncake_jax.sched.cost import CostModel
from mooncake_jax.sched.profiles import profile as cost_model

CLAIM = (
    "TTFT rises from KVCache-centric over cache-aware and load-balancing to random; the means of the first two are "
    "below 30 s."
)
SLO_S = 30.0
RANDOM = "random"
POLICIES = {name: name.lower() for name in ("KVCache-centric", "cache-aware", "load-balancing", RANDOM)}
CACHE_AWARE = ("KVCache-centric", "cache-aware")
PROFILES = ("arxiv", "micro")
SPEEDS = (1.6, 2.0)  # tried beside --speed
PREFILL_FACTORS = (1.0, 1.1, 1.2)
USUAL_THRESHOLD, THRESHOLDS = 2.0, (1.0, 2.0, 4.0)
SURROGATE_SPEED = 2.0
ORDER = "schedulers by mean TTFT"
CHOSEN = (
    "the load was chosen such that it is: with a little more, or slower prefill, cache-aware is not (see the sweeps)"
)

FLAGS = define_flags("arxiv_fig08", traces=True, trace=True, seeds=4)
flags.DEFINE_float("speed", 1.8, "how many times faster the trace is replayed", flag_values=FLAGS)
flags.DEFINE_integer("prefill", 8, "prefill instances", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_integer("decode", 8, "decoding instances", lower_bound=1, flag_values=FLAGS)

MEANS_AT = -0.42  # beside its box

Boxes = dict[str, Box]  # by scheduler


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    check_speed(FLAGS.speed, "--speed=")
    conversation, surrogates = released(FLAGS, "conversation"), report_traces(FLAGS)
    reported = described(FLAGS, surrogates)["trace"]
    paper = {name: dict(found) for name, found in papers("arxiv_fig08").items() if name in POLICIES}
    ours = {profile: boxes([conversation], profile, FLAGS.speed) for profile in PROFILES}
    stood_in = boxes(surrogates, PROFILES[0], SURROGATE_SPEED)
    found = [one for profile in PROFILES for one in headlines(ours[profile], paper, profile, conversation.label)]
    rows = [row for profile in PROFILES for row in rows_of(ours[profile], profile, conversation.label, FLAGS.speed)]
    rows += [*rows_of(stood_in, PROFILES[0], reported, SURROGATE_SPEED), *rows_of(paper, "paper", "paper", None)]
    drawn = {f"{conversation.label}, {FLAGS.speed:g} times as fast": ours[PROFILES[0]]}
    drawn |= {f"{reported}, {SURROGATE_SPEED:g} times as fast": stood_in}
    return publish(
        FLAGS,
        claim=CLAIM,
        rows=rows,
        headlines=[*found, *headlines_of_surrogates(stood_in, paper, reported)],
        sensitivities=[] if FLAGS.quick else [*sensitivities(conversation, ours[PROFILES[0]])],
        lessons=[
            "Reuse is capacity: where load balancing and random let the queues grow without end, choosing by what is "
            "cached spares enough computation to keep up with the same arrivals.",
        ],
        draw=lambda *panels: draw(panels, drawn, paper),
        panels=(1, 2),
        size=(10.0, 4.0),
    )


def boxes(
    traces: Sequence[Trace],
    cost: str | CostModel,
    speed: float,
    policies: Sequence[str] = tuple(POLICIES),
    **fields: Any,
) -> Boxes:
    """Of all traces together, and of random of all seeds; with the least and the greatest mean of one."""
    cluster = {"prefill": FLAGS.prefill, "decode": FLAGS.decode, "admission": "none"} | fields
    requests, seeds, found = [trace.requests(speed) for trace in traces], seeds_of(FLAGS), {}
    for name in policies:
        if len(traces) > 1:
            served = list(zip(requests, seeds, strict=True))
        else:
            served = [(requests[0], seed) for seed in (seeds if name == RANDOM else seeds[:1])]
        runs = [ttfts(run(of, cost, policy=POLICIES[name], seed=seed, **cluster).outcomes) for of, seed in served]
        means = [mean(each) for each in runs]
        found[name] = box_of([ttft for each in runs for ttft in each])
        found[name] |= {"least_mean": min(means), "greatest_mean": max(means)}
    return found


def ttfts(outcomes: list[Outcome]) -> list[float]:
    return [outcome.ttft_s for outcome in completed(outcomes)]


def headlines(ours: Boxes, paper: Boxes, profile: str, trace: str) -> Iterator[Headline]:
    common = {"profile": profile, "trace": trace, "kind": "fitted"}
    note = f"another trace at a load of our choice, {FLAGS.speed:g} times its own, on which all means depend"
    yield Headline(ORDER, by_mean(paper), by_mean(ours), same(), **common, note=note)
    for name, found in ours.items():
        about = (f"mean TTFT, {name}, s", paper[name]["mean"], found["mean"])
        if name in CACHE_AWARE:
            yield Headline(*about, at_most(SLO_S), **common, note=CHOSEN)
        else:
            note = spread_of(found) if name == RANDOM else ""
            yield Headline(*about, untargeted(), **common, note=note)


def headlines_of_surrogates(ours: Boxes, paper: Boxes, trace: str) -> Iterator[Headline]:
    common = {"profile": PROFILES[0], "trace": trace, "kind": "predicted"}
    yield Headline(ORDER, by_mean(paper), by_mean(ours), untargeted(), **common)
    for name, found in ours.items():
        about = (f"mean TTFT, {name}, s", paper[name]["mean"], found["mean"], untargeted())
        yield Headline(*about, **common, note=f"{SURROGATE_SPEED:g} times as fast; {spread_of(found)}")


def spread_of(found: Box) -> str:
    return f"means of the seeds from {found['least_mean']:.3g} to {found['greatest_mean']:.3g} s"


def by_mean(boxes: Boxes) -> str:
    return " < ".join(sorted(boxes, key=lambda name: boxes[name]["mean"]))


def sensitivities(trace: Trace, ours: Boxes) -> Iterator[Sensitivity]:
    """Of the means that have a target."""
    speeds = sorted({*SPEEDS, FLAGS.speed})
    by_speed = [ours if speed == FLAGS.speed else boxes([trace], PROFILES[0], speed, CACHE_AWARE) for speed in speeds]
    slower = [with_prefill_factor(cost_model(PROFILES[0]), factor) for factor in PREFILL_FACTORS[1:]]
    by_prefill = [ours, *(boxes([trace], cost, FLAGS.speed, CACHE_AWARE) for cost in slower)]
    for assumption, values, tried in (
        ("replay speed", speeds, by_speed),
        (f"prefill times this, {trace.label}, one seed (MFU is divided by it)", PREFILL_FACTORS, by_prefill),
    ):
        for name in CACHE_AWARE:
            yield Sensitivity(assumption, values, f"mean TTFT, {name}, s", [found[name]["mean"] for found in tried])
    centric = CACHE_AWARE[0]
    tried = [
        ours
        if threshold == USUAL_THRESHOLD
        else boxes([trace], PROFILES[0], FLAGS.speed, (centric,), kvcache_balancing_threshold=threshold)
        for threshold in THRESHOLDS
    ]
    means = [found[centric]["mean"] for found in tried]
    yield Sensitivity(
        f"kvcache_balancing_threshold, {trace.label}, one seed", THRESHOLDS, f"mean TTFT, {centric}, s", means
    )


def rows_of(boxes: Boxes, profile: str, trace: str, speed: float | None) -> Iterator[dict[str, Any]]:
    for name, found in boxes.items():
        for statistic, seconds in found.items():
            about = {"profile": profile, "trace": trace, "speed": speed, "scheduler": name}
            yield about | {"statistic": statistic, "ttft_s": seconds}


def draw(panels, ours: dict[str, Boxes], paper: Boxes) -> None:
    """Bars beside the boxes: from the least to the greatest mean of a seed."""
    for axes, (title, found) in zip(panels, ours.items(), strict=True):
        box(axes, found, paper)
        for place, of in enumerate(found.values()):
            about = {"color": "black", "linewidth": 3, "label": None if place else "ours: means of the seeds"}
            axes.plot([place + MEANS_AT] * 2, [of["least_mean"], of["greatest_mean"]], **about)
        axes.axhline(SLO_S, color="black", linestyle="--", linewidth=0.8, label="SLO")
        axes.set(ylabel="TTFT, s", title=f"{title}, profile {PROFILES[0]}")
    panels[0].legend(loc="upper left")


if __name__ == "__main__":
    run_script(main)
