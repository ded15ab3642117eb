"""Beyond the paper: instances that change between prefill and decoding, against fixed splits, under a changing load.

    python experiments/beyond_roles.py                       # half a minute

The report names switching nodes between prefill and decoding as future work. Here 16 nodes meet phases of 5 minutes:
long prompts with short outputs, then short prompts with long ones, and both again. No fixed split serves both well.
Expected: elastic roles (`--elastic_roles`, sched/elastic.py), from 12P+4D on and with a change each 10 s at most, keep
more requests within their SLOs than any fixed split; with the default of 30 s, in which half a phase goes by until
enough instances have moved, fewer than the best one. Poisson arrivals, 4 seeds; nothing is reused.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from beyond import PROFILE, SLOS, finding, good
from clusters import Trace, run
from figure import Sensitivity, define_flags, parse, publish, run_script, seeds_of
from style import bars
from surrogates import Spread

from mooncake_jax.simulate.run import Run
from mooncake_jax.workload.dice import Dice
from mooncake_jax.workload.trace import TRACE_BLOCK, TraceRow

CLAIM = "Where the load changes between prefill and decoding, instances that change with it serve more than any split."
PHASE_S, QUICK_PHASE_S = 300.0, 5.0
NODES = 16
FIXED = (12, 10, 8, 6, 4)  # prefill instances
ELASTIC = (12, 10.0)  # prefill instances at first, and after how many seconds roles change
CHOSEN = f"{ELASTIC[0]} prefill instances at first and {ELASTIC[1]:g} s between changes were chosen on this very load"
AFTER_S = (5.0, 10.0, 30.0, 60.0)
NAME = f"elastic from {ELASTIC[0]}P+{NODES - ELASTIC[0]}D"


@dataclass(frozen=True)
class Phase:
    """Requests a second on average; tokens."""

    rate: float
    prompt: int
    output: int


PHASES = {"long prompts": Phase(6.0, 12_288, 64), "long outputs": Phase(2.0, 2_048, 1_024)}
ROUNDS = 2

FLAGS = define_flags("beyond_roles", seeds=4)


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    traces = [changing_load(seed, QUICK_PHASE_S if FLAGS.quick else PHASE_S) for seed in seeds_of(FLAGS)]
    runs = {f"{prefill}P+{NODES - prefill}D": [serve(trace, prefill) for trace in traces] for prefill in FIXED}
    runs[NAME] = [serve(trace, *ELASTIC) for trace in traces]
    ours = {(name, phase): spread(of_each, phase) for name, of_each in runs.items() for phase in (*PHASES, "all")}
    label = f"generated, {len(traces)} seeds"
    rows = [
        {"roles": name, "phase": phase, "seed": seed, "within_slos_percent": part}
        for (name, phase), found in ours.items()
        for seed, part in zip(seeds_of(FLAGS), found.of_each, strict=True)
    ]
    changes = sum(len(one.roles["changes"]) for one in runs[NAME]) / len(traces)
    headlines = [finding(f"{name}, within SLOs, %", ours[name, "all"].mean, label) for name in runs if name != NAME]
    headlines += [
        finding(f"{NAME}, {what}", found, label, CHOSEN, chosen=True)
        for what, found in (("within SLOs, %", ours[NAME, "all"].mean), ("changes of role", changes))
    ]
    return publish(
        FLAGS,
        claim=CLAIM,
        rows=rows,
        headlines=headlines,
        sensitivities=[by_delay(traces[0])],
        lessons=lessons(ours, changes),
        draw=lambda axes: draw(axes, ours),
        size=(8.0, 4.0),
    )


def changing_load(seed: int, phase_s: float) -> Trace:
    dice, rows, begun = Dice("changing load", seed), [], 0.0
    for phase in (*PHASES.values(),) * ROUNDS:
        now = begun
        while (now := now + dice.exponential() / phase.rate) < begun + phase_s:
            first = rows[-1].hash_ids[-1] + 1 if rows else 0
            blocks = tuple(range(first, first + phase.prompt // TRACE_BLOCK))
            rows.append(TraceRow(1000 * now, phase.prompt, phase.output, blocks, len(rows)))
        begun += phase_s
    return Trace("changing load", rows)


def serve(trace: Trace, prefill: int, elastic_after_s: float | None = None) -> Run:
    """elastic_after_s: None: roles are fixed."""
    roles = {} if elastic_after_s is None else {"elastic_roles": True, "elastic_after_s": elastic_after_s}
    return run(trace.requests(), PROFILE, prefill=prefill, decode=NODES - prefill, admission="slo", **roles, **SLOS)


def spread(runs: Iterable[Run], phase: str) -> Spread:
    """Of the share of a phase's requests that completed within their SLOs, in per cent."""
    return Spread([within(one, phase) for one in runs])


def within(one: Run, phase: str) -> float:
    tokens = PHASES[phase].prompt if phase in PHASES else None
    there = [outcome for outcome in one.outcomes if tokens in (None, outcome.prompt_tokens)]
    return 100 * good(there) / len(there)


def by_delay(trace: Trace) -> Sensitivity:
    found = [within(serve(trace, ELASTIC[0], after_s), "all") for after_s in AFTER_S]
    return Sensitivity("seconds after which roles change, seed 0", AFTER_S, f"{NAME}, within SLOs, %", found)


def lessons(ours: dict[tuple[str, str], Spread], changes: float) -> list[str]:
    fixed = {name: part.mean for (name, phase), part in ours.items() if phase == "all" and name != NAME}
    best = max(fixed, key=fixed.get)
    return [
        f"The best fixed split, {best}, keeps {fixed[best]:.1f} % of the requests within their SLOs, and elastic roles "
        f"{ours[NAME, 'all'].mean:.1f} %, with {changes:.0f} changes of role in {2 * ROUNDS} phases; how soon roles "
        "change decides it, as the sweep shows."
    ]


def draw(axes, ours: dict[tuple[str, str], Spread]) -> None:
    names = list(dict.fromkeys(name for name, _ in ours))
    phases = list(dict.fromkeys(phase for _, phase in ours))
    heights = {phase: [ours[name, phase].mean for name in names] for phase in phases}
    spreads = {phase: [ours[name, phase].ends for name in names] for phase in phases}
    bars(axes, names, heights, spread=spreads)
    axes.set(title=f"profile {PROFILE}", ylabel="requests within SLOs, %", ylim=(0, 105))
    axes.legend(ncols=3)


if __name__ == "__main__":
    run_script(main)
