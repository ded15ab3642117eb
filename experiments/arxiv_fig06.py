"""Figure 6 of the report: how often the blocks of its trace are used.

    python experiments/arxiv_fig06.py                     # on surrogates of 4 seeds: 5 seconds
    python experiments/arxiv_fig06.py --trace=FILE        # on the report's own (mooncake-jax trace get mooncake)

Claim: more than half of all blocks are never used again, while some are used tens of thousands of times.
Expected: the share of blocks with at most 1, 2, 5 and 10 uses within 0.05, and the uses of the hottest two within 2 %.
"""

from clusters import Trace
from figure import Headline, define_flags, parse, points, publish, run_script, share
from reference import rows as paper_rows
from style import cdf
from surrogates import described, report_traces, spread

from mooncake_jax.workload.statistics import block_uses, uses_cdf

CLAIM = "More than half of the blocks are never used again, while a few are used in nearly every second request."
UPTO = (1, 2, 5, 10)  # uses
HOTTEST = ("uses of the hottest block", "of the next")
SHARES_APART = 0.05
NOTE = (
    "blocks used as often as figure 6 shows would be hit by 55 % of references, while table 1 has 51 %: the surrogate "
    "keeps to the table, and uses blocks a little less often"
)

Points = list[tuple[int, float]]  # uses, share of blocks with at most so many

FLAGS = define_flags("arxiv_fig06", trace=True, seeds=4)


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    traces, theirs = report_traces(FLAGS), paper()
    ours = [uses_cdf(block_uses(trace.rows)) for trace in traces]
    sources = [("paper", theirs), *((f"trace {place}", found) for place, found in enumerate(ours))]
    rows = [
        {"source": source, "uses": uses, "share_of_blocks": part} for source, found in sources for uses, part in found
    ]
    return publish(
        FLAGS,
        claim=CLAIM,
        rows=rows,
        headlines=headlines(traces, theirs),
        lessons=[
            f"{at_most(ours[0], 1):.0%} of the blocks are used once: a pool that could tell them apart would need less "
            "than half of the memory."
        ],
        draw=lambda axes: draw(axes, ours, theirs),
    )


def paper() -> Points:
    """The tops of its steps; other rows come from how the line was drawn."""
    steps = (row for row in paper_rows("arxiv_fig06") if row["flag"] == "step_top")
    return [(round(float(row["x_block_hit_count"])), float(row["y_cdf"])) for row in steps]


def at_most(found: Points, uses: int) -> float:
    """Share of the blocks with at most so many uses."""
    return max((part for count, part in found if count <= uses), default=0.0)


def hottest(trace: Trace, place: int) -> int:
    return block_uses(trace.rows).most_common(place + 1)[-1][1]


def headlines(traces: list[Trace], theirs: Points) -> list[Headline]:
    common = {"profile": "none"} | described(FLAGS, traces)
    shares = [
        Headline(
            f"share of blocks with at most {uses} use{'s' if uses > 1 else ''}",
            at_most(theirs, uses),
            spread(traces, lambda trace, uses=uses: at_most(uses_cdf(block_uses(trace.rows)), uses)).mean,
            points(SHARES_APART),
            note=NOTE,
            **common,
        )
        for uses in UPTO
    ]
    hot = [
        Headline(
            name, uses, spread(traces, lambda trace, place=place: hottest(trace, place)).mean, share(0.02), **common
        )
        for place, (name, (uses, _)) in enumerate(zip(HOTTEST, reversed(theirs[-2:]), strict=True))
    ]
    return shares + hot


def draw(axes, ours: list[Points], theirs: Points) -> None:
    for place, found in enumerate(ours):
        cdf(axes, found, "_" if place else "ours", 0)
    cdf(axes, theirs, "report", 0, paper=True)
    axes.set(xlabel="uses of a block", ylabel="share of blocks with at most so many", xscale="log", ylim=(0.5, 1.005))
    axes.legend()


if __name__ == "__main__":
    run_script(main)
