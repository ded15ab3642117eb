"""Beyond the paper: a threshold for copying hot blocks that finds itself, against fixed ones, by bandwidth.

    python experiments/beyond_threshold.py --traces=DIR      # half a minute

Algorithm 1 copies a prefix to another instance if the best match is more than so many times its own, and leaves the
threshold to operators (report 6.2; an adaptive one is its future work). Here it is fixed at several values, infinite
(never copy), or adaptive (sched/kvcache_centric.py), while NICs get slower. Expected: finite fixed ones hardly differ,
since what is copied to mostly has nothing of the prefix, which exceeds any of them; never copying is slower by 3 to
12 %. The adaptive one counts a block more on either side, so that it can refuse those copies as well: it is as good as
the best with 80 Gbps and more, and the best of all with 24 and 40, by 2 and 10 %. Such differences hang on little where
the network is the bottleneck: with 3.5 instead of 3.6 ms a request in decoding's steps, never copying was better than
the fixed ones with 24 Gbps, and with 40 the adaptive one as slow as never copying, 3.87 s where the fixed had 3.31 s.
"""

import math
from collections.abc import Sequence

from beyond import PROFILE, finding, mean_ttft, reused_share
from clusters import Trace, released, run
from figure import define_flags, parse, publish, run_script
from style import line

CLAIM = "Whether copying pays depends on the bandwidth; a threshold that adapts finds it out, but not at every one."
GBPS = (24, 40, 80, 160, 400)  # of a node's NIC
SECONDS = (1, 2, 5, 10, 20)  # marked in the picture
FIXED = (1.0, 2.0, 8.0, math.inf)
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
        lessons=[*(lesson(ours, gbps) for gbps in bandwidths), *where_it_is_off(ours, bandwidths)],
        draw=lambda axes: draw(axes, ours, bandwidths),
    )


def thresholds() -> list[str]:
    return [*(f"{threshold:g}" for threshold in FIXED), ADAPTIVE]


def serve(trace: Trace, name: str, gbps: int) -> tuple[float, float]:
    fields = {"policy": "adaptive"}
    if name != ADAPTIVE:
        fields = {"policy": "kvcache-centric", "kvcache_balancing_threshold": float(name)}
    served = run(trace.requests(), PROFILE, link_bytes_per_s=gbps * 1e9 / 8, **CLUSTER, **fields)
    return mean_ttft(served.outcomes), reused_share(served.outcomes)


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
    axes.set(xlabel="bandwidth of a node, Gbps", ylabel="mean TTFT, s", xscale="log", yscale="log")
    axes.xaxis.set_ticks(bandwidths, [str(gbps) for gbps in bandwidths])
    axes.yaxis.set_ticks(SECONDS, [str(seconds) for seconds in SECONDS])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks([], minor=True)
    axes.legend()


if __name__ == "__main__":
    run_script(main)
