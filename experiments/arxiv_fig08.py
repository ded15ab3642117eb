"""Report figure 8: TTFT by scheduler, under a load at which choosing well decides.

    python experiments/arxiv_fig08.py --traces=traces [--speed=1.8] [--trace=FILE]     # 2 minutes

Claim: KVCache-centric scheduling has the least TTFT, then cache-aware, then load balancing, then random; the first two
keep a mean below the SLO of 30 s. The report's own trace is not at hand: FAST25's conversation trace is served 1.8
times as fast on 8 prefill and 8 decoding instances, nothing is rejected. Expected: that order, and both cache-aware
means below 30 s. The means themselves are no target: 7 % more load make them 2 to 5 times as long.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags
from boxes import box_of as boxes_of
from clusters import Trace, completed, released, reports, run
from figure import Headline, Sensitivity, at_most, define_flags, parse, publish, run_script, same, untargeted
from reference import points as papers
from style import box

from mooncake_jax.request import Outcome

CLAIM = (
    "TTFT rises from KVCache-centric over cache-aware and load-balancing to random; the first two keep a mean of 30 s."
)
SLO_S = 30.0
POLICIES = {name: name.lower() for name in ("KVCache-centric", "cache-aware", "load-balancing", "random")}
CACHE_AWARE = ("KVCache-centric", "cache-aware")
PROFILES = ("arxiv", "micro")
SPEEDS = (1.6, 2.0)  # tried beside --speed
SURROGATE_SPEED = 2.0

FLAGS = define_flags("arxiv_fig08", traces=True, trace=True)
flags.DEFINE_float("speed", 1.8, "how many times faster the trace is replayed", lower_bound=0.001, flag_values=FLAGS)
flags.DEFINE_integer("prefill", 8, "prefill instances", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_integer("decode", 8, "decoding instances", lower_bound=1, flag_values=FLAGS)

Box = dict[str, float]


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    conversation, reported = released(FLAGS, "conversation"), reports(FLAGS)
    paper = {name: dict(found) for name, found in papers("arxiv_fig08").items() if name in POLICIES}
    ours = {profile: boxes(conversation, profile, FLAGS.speed) for profile in PROFILES}
    stood_in = boxes(reported, PROFILES[0], SURROGATE_SPEED)
    found = [one for profile in PROFILES for one in headlines(ours[profile], paper, profile, conversation.label)]
    rows = [row for profile in PROFILES for row in rows_of(ours[profile], profile, conversation.label, FLAGS.speed)]
    rows += [*rows_of(stood_in, PROFILES[0], reported.label, SURROGATE_SPEED), *rows_of(paper, "paper", "paper", None)]
    return publish(
        FLAGS,
        claim=CLAIM,
        rows=rows,
        headlines=[*found, order_of(stood_in, paper, PROFILES[0], reported.label, untargeted())],
        sensitivities=by_speed(conversation, ours[PROFILES[0]]),
        lessons=[
            "Reuse is capacity: where load balancing and random let the queues grow without end, choosing by what is "
            "cached spares enough computation to keep up with the same arrivals.",
        ],
        draw=lambda axes: draw(axes, ours[PROFILES[0]], paper),
    )


def boxes(trace: Trace, profile: str, speed: float, policies: Sequence[str] = tuple(POLICIES)) -> dict[str, Box]:
    cluster = {"prefill": FLAGS.prefill, "decode": FLAGS.decode, "admission": "none"}
    requests = trace.requests(speed)
    return {name: box_of(run(requests, profile, policy=POLICIES[name], **cluster).outcomes) for name in policies}


def box_of(outcomes: list[Outcome]) -> Box:
    return boxes_of(outcome.ttft_s for outcome in completed(outcomes))


def headlines(ours: dict[str, Box], paper: dict[str, Box], profile: str, trace: str) -> Iterator[Headline]:
    yield order_of(ours, paper, profile, trace, same())
    note = f"another trace at a load of our choice, {FLAGS.speed:g} times its own: the load decides (see the sweep)"
    for name, found in ours.items():
        tolerance = at_most(SLO_S) if name in CACHE_AWARE else untargeted()
        about = (f"mean TTFT, {name}, s", paper[name]["mean"], found["mean"], tolerance, profile, trace)
        yield Headline(*about, "predicted", note)


def order_of(ours: dict[str, Box], paper: dict[str, Box], profile: str, trace: str, tolerance) -> Headline:
    return Headline("schedulers by mean TTFT", by_mean(paper), by_mean(ours), tolerance, profile, trace, "predicted")


def by_mean(boxes: dict[str, Box]) -> str:
    return " < ".join(sorted(boxes, key=lambda name: boxes[name]["mean"]))


def by_speed(trace: Trace, ours: dict[str, Box]) -> list[Sensitivity]:
    """What the load does to the means that have a target."""
    speeds = sorted({FLAGS.speed} if FLAGS.quick else {*SPEEDS, FLAGS.speed})
    tried = [ours if speed == FLAGS.speed else boxes(trace, PROFILES[0], speed, CACHE_AWARE) for speed in speeds]
    return [
        Sensitivity("replay speed", speeds, f"mean TTFT, {name}, s", [found[name]["mean"] for found in tried])
        for name in CACHE_AWARE
    ]


def rows_of(boxes: dict[str, Box], profile: str, trace: str, speed: float | None) -> Iterator[dict[str, Any]]:
    for name, found in boxes.items():
        for statistic, seconds in found.items():
            about = {"profile": profile, "trace": trace, "speed": speed, "scheduler": name}
            yield about | {"statistic": statistic, "ttft_s": seconds}


def draw(axes, ours: dict[str, Box], paper: dict[str, Box]) -> None:
    box(axes, ours, paper)
    axes.axhline(SLO_S, color="black", linestyle="--", linewidth=0.8, label="SLO")
    axes.set(ylabel="TTFT, s")
    axes.legend()


if __name__ == "__main__":
    run_script(main)
