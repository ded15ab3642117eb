"""FAST25 figure 13: TTFT by the bandwidth between nodes, on the synthetic trace.

    python experiments/fast25_fig13.py --traces=DIR            # 32 s of CPU

Claim: above 100 Gbps mean TTFT stays below 2 s, below that it rises steeply. Expected: TTFT within 15 % of the paper's
at every bandwidth (within 10 % with `fast25`), its knee between 24 and 80 Gbps. All of it hangs on who sends, and on
the limit: where NICs receive no more than they send, eight decoding nodes hardly keep up with the trace at 24 Gbps.

Beside it the paper's transfer times: the theoretical ones, a whole prompt's KVCache over the bandwidth, and the real
ones, beside what the network adds to our mean TTFT: within a third at every bandwidth. No target.
"""

import math
from itertools import pairwise

from clusters import released
from fast25_cluster import ENGINE, Setup, serve
from figure import Headline, Sensitivity, between, define_flags, parse, publish, run_script, share, untargeted
from reference import points as papers
from reference import rows as paper_rows
from style import line

from mooncake_jax.model.architectures import ARCHITECTURES
from mooncake_jax.sched.profiles import SCHEDULE_S, profile

CLAIM = "Above 100 Gbps mean TTFT stays below 2 s; below, it rises steeply."
LINE_GBPS = 700.0  # what the paper's nodes send at full speed (87.5 GB/s, figures 12 and 14)
SLOW = {"receive_bytes_per_s": LINE_GBPS * 1e9 / 8}  # the limit holds for what is sent
SETUPS = (
    Setup("micro, one prompt after another", "micro", "fitted", SLOW),
    Setup("fast25", "fast25", "fitted", SLOW | ENGINE, first_step=True),
)
KNEE = 1.5  # times the TTFT of the fastest network
KV_BYTES = ARCHITECTURES["llama2-70b"].kv_bytes_per_token("bfloat16")
NOTE = (
    "who sends decides: the limit holds for what a node sends, KVCache of a reused prefix comes from any of 16 nodes, "
    "and transfers follow the prefill; all three were chosen with this figure in sight, none has a constant of its own"
)
TTFT, REAL, THEORETICAL = "mean TTFT", "Real Time", "Theoretical Time"  # of a transfer, as the paper's CSV has them
Curve = list[tuple[float, float]]  # (Gbps, seconds)

FLAGS = define_flags("fast25_fig13", traces=True)


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    trace = released(FLAGS, "synthetic")
    requests = trace.requests()
    expected = [(float(gbps), seconds) for gbps, seconds in papers("fast25_fig13_ttft")["Avg TTFT"]]
    gbps = [x for x, _ in expected][:: 3 if FLAGS.quick else 1]
    found = {setup.label: curve(requests, setup, gbps) for setup in SETUPS}
    times = transfers(requests, found, gbps)
    rows = [
        {"source": source, "what": what, "gbps": x, "seconds": y}
        for what, by_source in {TTFT: {**found, "paper": expected}, **times}.items()
        for source, c in by_source.items()
        for x, y in c
    ]
    headlines = [h for s in SETUPS for h in headlines_of(s, found[s.label], expected, trace.label)]
    headlines += transfer_headlines(times, trace.label)
    headlines.append(recomputation(requests, trace.label))
    shown = [] if FLAGS.quick else sensitivities(requests, dict(found[SETUPS[1].label]))
    return publish(
        FLAGS,
        claim=CLAIM,
        rows=rows,
        headlines=headlines,
        sensitivities=shown,
        lessons=[
            "TTFT is what it is on a fast network, and the transfer: KVCache that leaves after its prefill hides "
            "nowhere.",
            "On slow networks it matters as much who sends as how fast: a pool on all 16 nodes has twice as many NICs "
            "to send from as its prefill nodes.",
        ],
        draw=lambda *panels: draw(panels, found, expected, times),
        panels=(1, 2),
        size=(9.6, 3.8),
    )


def curve(requests, setup: Setup, gbps: list[float]) -> Curve:
    return [(x, at(requests, setup, x)) for x in gbps]


def at(requests, setup: Setup, gbps: float, **fields) -> float:
    """Mean TTFT in seconds."""
    return serve(requests, setup.changed(link_bytes_per_s=gbps * 1e9 / 8, **fields)).mean_ttft


def headlines_of(setup: Setup, found: Curve, expected: Curve, trace: str) -> list[Headline]:
    common = {"profile": setup.label, "trace": trace, "kind": setup.kind, "note": NOTE}
    theirs = dict(expected)
    rows = [Headline(f"mean TTFT at {x:g} Gbps, s", theirs[x], y, share(0.15), **common) for x, y in found]
    title = f"knee: bandwidth at which TTFT is {KNEE:g} times that of the fastest, Gbps"
    return [*rows, Headline(title, knee(expected), knee(found), between(24, 80), **common)]


def knee(found: Curve) -> float | None:
    """Where TTFT passes KNEE times that of the fastest network, on straight lines over the logarithm of bandwidth."""
    limit = KNEE * found[-1][1]
    for (slow, above), (fast, below) in pairwise(found):
        if above >= limit > below:
            part = (above - limit) / (above - below)
            return slow * (fast / slow) ** part
    return None


def transfers(requests, found: dict[str, Curve], gbps: list[float]) -> dict[str, dict[str, Curve]]:
    """By what and source: how long transfers take in theory, and what the network adds to the mean TTFT, over that at
    full speed, whose transfer counts as in theory.
    """
    whole = math.fsum(request.prompt_tokens for request in requests) / len(requests) * KV_BYTES
    added = {}
    for setup in SETUPS:
        least = at(requests, setup, LINE_GBPS) - whole / (LINE_GBPS * 1e9 / 8)
        added[setup.label] = [(x, ttft - least) for x, ttft in found[setup.label]]
    theirs = {what: [(float(x), y) for x, y in of] for what, of in papers("fast25_fig13_transfer").items()}
    ours = {THEORETICAL: {"ours": [(x, whole / (x * 1e9 / 8)) for x in gbps]}, REAL: added}
    return {what: of | {"paper": theirs[what]} for what, of in ours.items()}


def transfer_headlines(times: dict[str, dict[str, Curve]], trace: str) -> list[Headline]:
    made = []
    kinds = {"ours": ("none", "predicted")} | {setup.label: (setup.label, setup.kind) for setup in SETUPS}
    for what, by_source in times.items():
        theirs = dict(by_source["paper"])
        title = "transfer in theory" if what == THEORETICAL else "transfer, ours what the network adds to mean TTFT"
        note = "" if what == THEORETICAL else NOTE
        for source, found in by_source.items():
            if source != "paper":
                profile_, kind = kinds[source]
                made += [
                    Headline(f"{title}, {x:g} Gbps, s", theirs[x], y, untargeted(), profile_, trace, kind, note)
                    for x, y in found
                ]
    return made


def recomputation(requests, trace: str) -> Headline:
    """TTFT without any reuse: the paper's horizontal line."""
    [row] = [row for row in paper_rows("fast25_fig13_ttft") if row["flag"] == "reference_line"]
    cost = profile("micro")
    whole = [SCHEDULE_S + cost.prefill(r.prompt_tokens, 0) + cost.load(r.prompt_tokens * KV_BYTES) for r in requests]
    note = (
        "ours is service alone: without reuse 8 prefill nodes would queue without end, so the paper's can have no queue"
    )
    return Headline(
        "TTFT of recomputing everything, s",
        float(row["y_avg_ttft_s"]),
        math.fsum(whole) / len(whole),
        untargeted(),
        "micro",
        trace,
        "predicted",
        note,
    )


def sensitivities(requests, found: dict[float, float]) -> list[Sensitivity]:
    base = SETUPS[1]
    slow, fast = 24.0, 400.0
    changes = {
        "as it is": {},
        "NICs receive no more than they send": {"receive_bytes_per_s": None},
        "the prefill node sends all": {"prefix_senders": "prefill"},
        "layer-wise overlap": {"without": frozenset()},
        "one prompt after another": {"batched_prefill": False, "token_budget": None},
        "TTFT ends with the prefill": {"first_step": False},
    }
    moved = {
        x: [found[x] if not c else at(requests, base, x, **c) for c in changes.values()] for x in (slow, 40.0, fast)
    }
    factors = (1.0, 1.1, 1.25)
    slower = {
        x: [found[x] if factor == 1.0 else at(requests, base, x, prefill_factor=factor) for factor in factors]
        for x in (slow, fast)
    }
    return [
        Sensitivity(assumption, values, f"mean TTFT at {x:g} Gbps, s", results)
        for assumption, values, by_gbps in (
            ("how it is run", list(changes), moved),
            ("how many times as long prefill computes (MFU)", factors, slower),
        )
        for x, results in by_gbps.items()
    ]


def draw(panels, found: dict[str, Curve], expected: Curve, times: dict[str, dict[str, Curve]]) -> None:
    ticks = [x for x, _ in expected]
    for axes, label in zip(panels, ("mean TTFT, s", "transfer, s"), strict=True):
        axes.set(xlabel="bandwidth of a node, Gbps", ylabel=label, xscale="log")
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.minorticks_off()
    for place, setup in enumerate(found):
        line(panels[0], found[setup], setup, place)
        line(panels[1], times[REAL][setup], f"added to mean TTFT, {setup}", place)
    line(panels[0], expected, "paper (FAST25)", len(found), paper=True)
    line(panels[1], times[REAL]["paper"], "real, FAST25", len(found), paper=True)
    line(panels[1], times[THEORETICAL]["ours"], "in theory, ours", len(found) + 1)
    line(panels[1], times[THEORETICAL]["paper"], "in theory, FAST25", len(found) + 1, paper=True)
    panels[1].set(yscale="log")
    for axes in panels:
        axes.legend()


if __name__ == "__main__":
    run_script(main)
