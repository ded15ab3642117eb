"""Beyond the paper: an SSD below each node's DRAM, by its size.

    python experiments/beyond_ssd.py --traces=DIR            # 1 minute

The paper's pool is of DRAM and, it says, SSD, and no figure shows what the latter brings. Here 8P+8D serve FAST25's
traces with 0.3 million tokens of DRAM a node, and with the 3 million that FAST25 has, over SSDs of several sizes.
Expected: with little DRAM the SSD brings most of the hits that a larger DRAM would; with much there is little left to
find. The rate of the drives is an assumption, of which the sensitivity shows what it decides.
"""

from collections.abc import Sequence
from dataclasses import replace

from beyond import PROFILE, finding, mean_ttft, reused_share
from clusters import Trace, released, run
from figure import Sensitivity, define_flags, parse, publish, run_script
from style import line

from mooncake_jax.model.architectures import ARCHITECTURES
from mooncake_jax.sched.profiles import profile

CLAIM = "Where DRAM is small, an SSD below it brings most of the hits that more DRAM would."
NAMES = ("conversation", "synthetic")
DRAM_TOKENS = (300_000, 3_000_000)  # of a node
SSD_TOKENS = (0, 1_000_000, 3_000_000, 10_000_000)  # of a node
READ_GBPS = (1.7, 3.4, 6.8, 13.6)  # GB/s of a node's drives
TOKEN_BYTES = ARCHITECTURES["llama2-70b"].kv_bytes_per_token("bfloat16")

Found = dict[tuple[str, int, int], tuple[float, float]]  # by trace, DRAM, SSD: reused share, mean TTFT in seconds

FLAGS = define_flags("beyond_ssd", traces=True)


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    traces = {name: released(FLAGS, name) for name in NAMES}
    sizes: Sequence[int] = SSD_TOKENS[::3] if FLAGS.quick else SSD_TOKENS
    ours = {
        (name, dram, ssd): serve(trace, dram, ssd)
        for name, trace in traces.items()
        for dram in DRAM_TOKENS
        for ssd in sizes
    }
    rows = [
        {"trace": name, "dram_tokens": dram, "ssd_tokens": ssd, "reused_share": reused, "mean_ttft_s": ttft}
        for (name, dram, ssd), (reused, ttft) in ours.items()
    ]
    headlines = [
        finding(f"{what}, DRAM {millions(dram)}, SSD {millions(ssd)}", number, traces[name].label)
        for (name, dram, ssd), numbers in ours.items()
        if ssd in (sizes[0], sizes[-1])
        for what, number in zip(("share reused", "mean TTFT, s"), numbers, strict=True)
    ]
    return publish(
        FLAGS,
        claim=CLAIM,
        rows=rows,
        headlines=headlines,
        sensitivities=[by_rate(traces["synthetic"], sizes[-1])],
        lessons=[lesson(ours, name, sizes[-1]) for name in NAMES],
        draw=lambda *panels: draw(panels, ours, sizes),
        panels=(1, 2),
        size=(9.0, 3.8),
    )


def serve(trace: Trace, dram: int, ssd: int, read_gb: float | None = None) -> tuple[float, float]:
    """read_gb: GB/s of the SSD, None: as the profile has it."""
    cost = profile(PROFILE)
    if read_gb is not None:
        cost = replace(cost, ssd_read_coefficients=(cost.ssd_read_coefficients[0], 1 / (read_gb * 1e9)))
    sizes = {"dram_bytes": dram * TOKEN_BYTES, "ssd_bytes": ssd * TOKEN_BYTES}
    outcomes = run(trace.requests(), cost, prefill=8, decode=8, admission="none", **sizes).outcomes
    return reused_share(outcomes), mean_ttft(outcomes)


def by_rate(trace: Trace, ssd: int) -> Sensitivity:
    found = [serve(trace, DRAM_TOKENS[0], ssd, rate)[1] for rate in READ_GBPS]
    name = f"mean TTFT, s, DRAM {millions(DRAM_TOKENS[0])}, SSD {millions(ssd)}, {trace.label}"
    return Sensitivity("rate at which a node reads its SSD, GB/s", READ_GBPS, name, found)


def millions(tokens: int) -> str:
    return f"{tokens / 1e6:g} M tokens a node"


def lesson(ours: Found, name: str, ssd: int) -> str:
    small, large = DRAM_TOKENS
    pools = ((small, 0), (small, ssd), (large, 0))
    (without, slow), (with_it, quick), (more, quickest) = (ours[name, *pool] for pool in pools)
    return (
        f"{name}: an SSD of {millions(ssd)} below {millions(small)} of DRAM takes reuse from {without:.1%} to "
        f"{with_it:.1%} and mean TTFT from {slow:.2f} to {quick:.2f} s; ten times the DRAM without an SSD: {more:.1%} "
        f"and {quickest:.2f} s."
    )


def draw(panels, ours: Found, sizes: Sequence[int]) -> None:
    for place, name in enumerate(NAMES):
        for shift, dram in enumerate(DRAM_TOKENS):
            for axes, number in zip(panels, (0, 1), strict=True):
                points = [(ssd / 1e6, ours[name, dram, ssd][number]) for ssd in sizes]
                line(axes, points, f"{name}, DRAM {millions(dram)}", 2 * place + shift)
    for axes, label in zip(panels, ("share of prompt tokens reused", "mean TTFT, s"), strict=True):
        axes.set(title=f"profile {PROFILE}", xlabel="SSD of a node, million tokens", ylabel=label, ylim=(0, None))
        axes.legend()


if __name__ == "__main__":
    run_script(main)
