"""Figure 5 of the report: how long the prompts and the outputs of its trace are.

    python experiments/arxiv_fig05.py                     # on surrogates of 4 seeds: 5 seconds
    python experiments/arxiv_fig05.py --trace=FILE        # on the report's own (mooncake-jax trace get mooncake)

Claim: most prompts are short and a few have over 100k tokens; more than half of the outputs have 50 tokens or fewer.
Expected: at no edge of a bin is the share of shorter requests off by more than 0.02; means of 7,590 and 182 tokens.
"""

import itertools
import statistics
from bisect import bisect_left

from clusters import Trace
from figure import Headline, at_most, define_flags, parse, publish, run_script, share
from reference import points as paper_points
from reference import rows as paper_rows
from style import line
from surrogates import described, report_traces, spread

CLAIM = "Most prompts are short, with a tail beyond 100k tokens; more than half of the outputs have 50 tokens or fewer."
LENGTHS = {"input": "input_length", "output": "output_length"}  # by the name of the paper's file: a field of rows
MOST_APART = 0.02

Bins = list[tuple[float, float]]  # from, to (tokens)
Counted = list[tuple[tuple[float, float], int]]  # bin, requests

FLAGS = define_flags("arxiv_fig05", trace=True, seeds=4)


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    traces = report_traces(FLAGS)
    papers = {what: paper(what) for what in LENGTHS}
    bins = {what: [bin_ for bin_, _ in counted] for what, counted in papers.items()}
    ours = {what: [counts(lengths_of(trace, what), bins[what]) for trace in traces] for what in LENGTHS}
    return publish(
        FLAGS,
        claim=CLAIM,
        rows=rows(papers, ours, bins),
        headlines=[headline for what in LENGTHS for headline in headlines(what, traces, papers[what])],
        lessons=[
            "The means that the report names are below those of its own histograms (the middles of the bins have 8,433 "
            "and 188 tokens): lengths lie in the lower part of their bins, which a surrogate has to choose."
        ],
        draw=lambda *panels: draw(panels, ours, papers),
        panels=(1, 2),
        size=(9.0, 3.6),
    )


def paper(what: str) -> Counted:
    return [
        ((float(row["x_bin_left_tokens"]), float(row["x_bin_right_tokens"])), int(row["y_count_requests"]))
        for row in paper_rows(f"arxiv_fig05_{what}")
    ]


def lengths_of(trace: Trace, what: str) -> list[int]:
    return sorted(getattr(row, LENGTHS[what]) for row in trace.rows)


def counts(lengths: list[int], bins: Bins) -> list[int]:
    """Requests of each bin, of lengths in order; what is beyond the ends counts in the bin there."""
    below = [0, *(bisect_left(lengths, edge) for _, edge in bins[:-1]), len(lengths)]
    return [after - before for before, after in itertools.pairwise(below)]


def headlines(what: str, traces: list[Trace], counted: Counted) -> list[Headline]:
    common = {"profile": "none"} | described(FLAGS, traces)
    mean = spread(traces, lambda trace: statistics.mean(lengths_of(trace, what))).mean
    apart = spread(traces, lambda trace: distance(lengths_of(trace, what), counted)).mean
    theirs = dict(paper_points("arxiv_fig05_means")["text"])  # the report's text has them
    name = f"{what} lengths, largest distance of both CDFs"
    return [
        Headline(f"mean {what} length, tokens", theirs[what], mean, share(0.02), **common),
        Headline(name, 0.0, apart, at_most(MOST_APART), **common),
    ]


def distance(lengths: list[int], counted: Counted) -> float:
    """Kolmogorov's, at the edges of the bins; of lengths in order."""
    total, so_far, most = sum(count for _, count in counted), 0, 0.0
    for (_, edge), count in counted[:-1]:
        so_far += count
        most = max(most, abs(so_far / total - bisect_left(lengths, edge) / len(lengths)))
    return most


def rows(papers: dict, ours: dict, bins: dict[str, Bins]) -> list[dict]:
    sources = {what: [("paper", [count for _, count in papers[what]])] for what in LENGTHS}
    for what, of_each in ours.items():
        sources[what] += [(f"trace {place}", found) for place, found in enumerate(of_each)]
    return [
        {"source": source, "length": what, "from_tokens": left, "to_tokens": right, "requests": count}
        for what in LENGTHS
        for source, found in sources[what]
        for (left, right), count in zip(bins[what], found, strict=True)
    ]


def draw(panels, ours: dict[str, list[list[int]]], papers: dict) -> None:
    for axes, what in zip(panels, LENGTHS, strict=True):
        middles = [(left + right) / 2 for (left, right), _ in papers[what]]
        by_bin = list(zip(*ours[what], strict=True))
        mean = [sum(found) / len(found) for found in by_bin]
        kept = [place for place, count in enumerate(mean) if count]  # a logarithm has no zero
        spreads = [(max(min(by_bin[place]), 0.5), max(by_bin[place])) for place in kept]
        line(axes, [(middles[place], mean[place]) for place in kept], "ours", 0, spread=spreads, markers=False)
        theirs = [(middle, count) for middle, (_, count) in zip(middles, papers[what], strict=True) if count]
        line(axes, theirs, "report", 0, paper=True)
        axes.set(title=f"{what} lengths", xlabel="tokens", ylabel="requests in a bin", yscale="log")
        axes.legend()


if __name__ == "__main__":
    run_script(main)
