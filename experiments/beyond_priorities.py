"""Beyond the paper: priority classes in overload, and who is rejected.

    python experiments/beyond_priorities.py --traces=DIR     # half a minute

The report names priorities as future work. Here the first half of the conversation trace is served at several speeds by
8P+8D, its requests put into three classes by chance (4 seeds), and lower classes are rejected first
(sched/priorities.py); beside it the same without classes. Expected: the highest class is hardly ever rejected and the
lowest nearly always; more are rejected in all, and so more of all are served within their SLOs: the slo admission by
itself lets TBT come so near to its limit that many who are admitted miss it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from beyond import PROFILE, SLOS, finding, good
from clusters import Trace, released, run
from figure import define_flags, parse, publish, run_script, seeds_of
from style import line
from surrogates import Spread

from mooncake_jax.request import REJECTED, Outcome
from mooncake_jax.workload.dice import Dice

CLAIM = "With priority classes overload is rejected from the lowest class up, and no fewer requests are served."
CLASSES = {9: 0.2, 5: 0.5, 0: 0.3}  # priority: share of the requests
SPEEDS = (1.5, 2.0, 3.0)
SHOWN_SPEED = 2.0
REQUESTS = 6_000
WITHOUT, WITH = "no classes", "classes"

Found = dict[tuple[str, str, float], Spread]  # by WITHOUT or WITH, what, speed: per cent

FLAGS = define_flags("beyond_priorities", traces=True, seeds=4)


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    trace = released(FLAGS, "conversation")
    trace = Trace(trace.label, trace.rows[:REQUESTS])
    speeds: Sequence[float] = (SHOWN_SPEED,) if FLAGS.quick else SPEEDS
    ours = {}
    for speed in speeds:
        ours |= {(WITHOUT, what, speed): found for what, found in served(trace, speed, WITHOUT).items()}
        ours |= {(WITH, what, speed): found for what, found in served(trace, speed, WITH).items()}
    rows = [
        {"run": way, "what": what, "speed": speed, "seed": seed, "percent": part}
        for (way, what, speed), found in ours.items()
        for seed, part in zip(seeds_of(FLAGS), found.of_each, strict=True)
    ]
    return publish(
        FLAGS,
        claim=CLAIM,
        rows=rows,
        headlines=[
            finding(f"{what}, {way}, {speed:g}x, %", found.mean, trace.label)
            for (way, what, speed), found in ours.items()
            if speed == SHOWN_SPEED
        ],
        lessons=[lesson(ours)],
        draw=lambda *panels: draw(panels, ours, speeds),
        panels=(1, 2),
        size=(9.0, 3.8),
    )


def served(trace: Trace, speed: float, way: str) -> Mapping[str, Spread]:
    """For each seed of the classes: who is rejected of each, and who of all is served within the SLOs, in per cent."""
    found: dict[str, list[float]] = {}
    outcomes = serve(trace, speed, {})
    for seed in seeds_of(FLAGS):
        classes = drawn(trace, seed)
        if way == WITH:
            outcomes = serve(trace, speed, classes)
        for what, part in counted(outcomes, classes).items():
            found.setdefault(what, []).append(part)
    return {what: Spread(parts) for what, parts in found.items()}


def drawn(trace: Trace, seed: int) -> dict[str, int]:
    """The class of each request, by its id."""
    dice, found = Dice("priorities", seed), {}
    for row in trace.rows:
        place = dice.uniform()
        for priority, part in CLASSES.items():
            found[str(row.index)] = priority
            place -= part
            if place < 0:
                break
    return found


def serve(trace: Trace, speed: float, classes: Mapping[str, int]) -> list[Outcome]:
    """classes: of each request; one that is not named is of the lowest, as all are where none is."""
    requests = [replace(request, priority=classes.get(request.id, 0)) for request in trace.requests(speed)]
    return run(requests, PROFILE, prefill=8, decode=8, admission="slo", **SLOS).outcomes


def counted(outcomes: Sequence[Outcome], classes: Mapping[str, int]) -> dict[str, float]:
    found = {}
    for priority in CLASSES:
        of_class = [outcome for outcome in outcomes if classes[outcome.id] == priority]
        rejected = sum(outcome.status == REJECTED for outcome in of_class)
        found[f"rejected of class {priority}"] = 100 * rejected / max(len(of_class), 1)
    return found | {"all within SLOs": 100 * good(outcomes) / len(outcomes)}


def lesson(ours: Found) -> str:
    parts = ", ".join(
        f"{ours[WITH, f'rejected of class {priority}', SHOWN_SPEED].mean:.0f} % of class {priority}"
        for priority in CLASSES
    )
    alike = ours[WITHOUT, f"rejected of class {min(CLASSES)}", SHOWN_SPEED].mean
    with_it, without = (ours[way, "all within SLOs", SHOWN_SPEED].mean for way in (WITH, WITHOUT))
    return (
        f"At twice the speed {parts} are rejected, and without classes {alike:.0f} % of each; {with_it:.1f} % of all "
        f"are served within their SLOs, without classes {without:.1f} %."
    )


def draw(panels, ours: Found, speeds: Sequence[float]) -> None:
    rejected, kept = panels
    for place, priority in enumerate(CLASSES):
        what = f"rejected of class {priority}"
        plot(rejected, ours, WITH, what, speeds, f"class {priority}", place)
    plot(rejected, ours, WITHOUT, what, speeds, "no classes", len(CLASSES))
    for place, way in enumerate((WITH, WITHOUT)):
        plot(kept, ours, way, "all within SLOs", speeds, way, place)
    for axes, label in zip(panels, ("rejected, %", "requests within SLOs, %"), strict=True):
        axes.set(
            title=f"profile {PROFILE}", xlabel="speed of the trace", ylabel=label, ylim=(-3, 105)
        )  # nobody rejected stands above the axis
        axes.legend()


def plot(axes, ours: Found, way: str, what: str, speeds: Sequence[float], label: str, place: int) -> None:
    found = [ours[way, what, speed] for speed in speeds]
    points = [(speed, one.mean) for speed, one in zip(speeds, found, strict=True)]
    line(axes, points, label, place, spread=[one.ends for one in found])


if __name__ == "__main__":
    run_script(main)
