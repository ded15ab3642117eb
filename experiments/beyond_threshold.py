"""Beyond the paper: a threshold for copying hot blocks that finds itself, against fixed ones, by bandwidth.

    python experiments/beyond_threshold.py --traces=DIR      # 1 minute

Algorithm 1 copies a prefix to another instance if the best match is more than so many times its own, and leaves the
threshold to operators (report 6.2; an adaptive one is its future work). Here it is fixed at several values, infinite
(never copy), or adaptive (sched/kvcache_centric.py), while NICs get slower. Expected: finite fixed ones hardly differ,
since what is copied to mostly has nothing of the prefix, which exceeds any of them; with 80 Gbps and more they are
right, and so is the adaptive one, which counts a block more on either side and so can refuse such copies as well. With
40 Gbps never copying is slower too; else, with 24 and 40 Gbps, where the network is the bottleneck, one run says
little: which of them is the best, by up to 20 %, changes with a few per cent of decoding's costs (sensitivities).
"""

import math
from collections.abc import Iterator, Sequence

from beyond import PROFILE, finding, mean_ttft, reused_share
from clusters import Trace, released, run
from figure import Sensitivity, define_flags, parse, publish, run_script
from style import line
from systems import with_request_ms

from mooncake_jax.sched.cost import CostModel
from mooncake_jax.sched.profiles import profile

CLAIM = "Copying hot blocks shortens TTFT from 40 Gbps on, by any threshold; with 24 Gbps it hangs on details."
GBPS = (24, 40, 80, 160, 400)  # of a node's NIC
SLOW = (24, 40)  # of these
REQUEST_MS = (3.4, 3.5, 3.6, 3.7)  # that a request adds to a decoding step; PROFILE has one of them
SECONDS = (1, 2, 5, 10, 20)  # marked in the picture
FIXED = (1.0, 2.0, 8.0, math.inf)
NEVER = f"{math.inf:g}"
ADAPTIVE = "adaptive"
TOLD = 0.05  # by how much of the best fixed one's mean TTFT the adaptive one is off where that is told
CLUSTER = {"prefill": 8, "decode": 8, "admission": "none"}

Found = dict[tuple[str, int], tuple[float, float]]  # by threshold and Gbps: mean TTFT in seconds, share reused

FLAGS = define_flags("beyond_threshold", traces=True)


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    trace = released(FLAGS, "synthetic")
    bandwidths: Sequence[int] = GBPS[::4] if FLAGS.quick else GBPS
    ours = {(name, gbps): serve(trace, name, gbps) for name in thresholds() for gbps in bandwidths}
    rows = [
        {"threshold": name, "gbps": gbps, "mean_ttft_s": ttft, "reused_share": reused}
        for (name, gbps), (ttft, reused) in ours.items()
    ]
    return publish(
        FLAGS,
        claim=CLAIM,
        rows=rows,
        headlines=[
            finding(f"threshold {name}, {gbps} Gbps, mean TTFT, s", ttft, trace.label)
            for (name, gbps), (ttft, _) in ours.items()
            if gbps in (bandwidths[0], bandwidths[-1])
        ],
        sensitivities=[] if FLAGS.quick else [*sensitivities(trace)],
        lessons=[*(lesson(ours, gbps) for gbps in bandwidths), *where_it_is_off(ours, bandwidths)],
        draw=lambda axes: draw(axes, ours, bandwidths),
    )


def thresholds() -> list[str]:
    return [*(f"{threshold:g}" for threshold in FIXED), ADAPTIVE]


def serve(trace: Trace, name: str, gbps: int, cost: str | CostModel = PROFILE) -> tuple[float, float]:
    fields = {"policy": "adaptive"}
    if name != ADAPTIVE:
        fields = {"policy": "kvcache-centric", "kvcache_balancing_threshold": float(name)}
    served = run(trace.requests(), cost, link_bytes_per_s=gbps * 1e9 / 8, **CLUSTER, **fields)
    return mean_ttft(served.outcomes), reused_share(served.outcomes)


def sensitivities(trace: Trace) -> Iterator[Sensitivity]:
    """Of those that may refuse copies, over one that never does."""
    costs = [with_request_ms(profile(PROFILE), request_ms) for request_ms in REQUEST_MS]
    for gbps in SLOW:
        usual = [serve(trace, f"{FIXED[1]:g}", gbps, cost)[0] for cost in costs]
        for name in (ADAPTIVE, NEVER):
            ratios = [serve(trace, name, gbps, cost)[0] / than for cost, than in zip(costs, usual, strict=True)]
            headline = f"mean TTFT, threshold {name} over {FIXED[1]:g}, {gbps} Gbps"
            yield Sensitivity("ms that a request more adds to a decoding step", REQUEST_MS, headline, ratios)


def fixed_ones(ours: Found, gbps: int) -> dict[str, float]:
    """Mean TTFT of each, in seconds."""
    return {name: ours[name, gbps][0] for name in thresholds() if name != ADAPTIVE}


def lesson(ours: Found, gbps: int) -> str:
    fixed = fixed_ones(ours, gbps)
    best, worst = min(fixed, key=fixed.get), max(fixed, key=fixed.get)
    return (
        f"{gbps} Gbps: of the fixed thresholds {best} has the shortest mean TTFT, {fixed[best]:.2f} s, and {worst} the "
        f"longest, {fixed[worst]:.2f} s; the adaptive one has {ours[ADAPTIVE, gbps][0]:.2f} s."
    )


def where_it_is_off(ours: Found, bandwidths: Sequence[int]) -> list[str]:
    """A sentence on it, or none."""
    longer = {gbps: ours[ADAPTIVE, gbps][0] / min(fixed_ones(ours, gbps).values()) - 1 for gbps in bandwidths}
    told = [f"{part:.0%} with {gbps} Gbps" for gbps, part in longer.items() if part > TOLD]
    if not told:
        return []
    return [f"The adaptive one's mean TTFT is longer than the best fixed one's by {', '.join(told)}."]


def draw(axes, ours: Found, bandwidths: Sequence[int]) -> None:
    for place, name in enumerate(thresholds()):
        line(axes, [(gbps, ours[name, gbps][0]) for gbps in bandwidths], f"threshold {name}", place)
    axes.set(
        title=f"profile {PROFILE}",
        xlabel="bandwidth of a node, Gbps",
        ylabel="mean TTFT, s",
        xscale="log",
        yscale="log",
    )
    axes.xaxis.set_ticks(bandwidths, [str(gbps) for gbps in bandwidths])
    axes.yaxis.set_ticks(SECONDS, [str(seconds) for seconds in SECONDS])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks([], minor=True)
    axes.legend()


if __name__ == "__main__":
    run_script(main)
