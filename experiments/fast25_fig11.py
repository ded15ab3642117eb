"""FAST25 figure 11: how many replicas hot blocks have, over an hour of traffic.

    python experiments/fast25_fig11.py --traces=DIR            # 47 s of CPU

Claim: Algorithm 1 copies hot blocks to most prefill nodes, and cold ones come and go. Expected: on the conversation
trace the 10th hottest block is on all 8 prefill nodes at a time, and peaks fall with the rank, as in the paper; but
with LRU replicas do not stay as they do there. Blocks are ranked as in the paper: by the replicas that all samples, one
each 30 s, have found of them.
"""

from collections import Counter

from clusters import released
from fast25_cluster import Setup, serve
from figure import Headline, Sensitivity, at_least, define_flags, parse, publish, run_script, same, untargeted
from reference import points as papers
from style import line

from mooncake_jax.sched.messages import CONDUCTOR

CLAIM = (
    "Blocks that many prompts begin with come to lie on most prefill nodes by themselves; rarely used ones do not stay."
)
TRACES = ("conversation", "toolagent", "synthetic")
EVERY_S = 30.0
RANKS = (10, 100, 1000, 10_000)
PREFILL = 8
MOST = 5  # of PREFILL nodes: more than half
IN_ORDER = "falls with the rank"
SETUP = Setup("fast25", "fast25", "predicted", {})
OTHERS = (  # on the conversation trace
    Setup("micro", "micro", "predicted", {}),
    Setup("fast25, LFU", "fast25", "predicted", {"eviction": "lfu"}),
)
NOTE = "a copy is made for a request that is quicker with it: how often prompts of one prefix meet full queues decides"
Series = dict[int, list[tuple[float, int]]]  # by rank (seconds, replicas)

FLAGS = define_flags("fast25_fig11", traces=True)


class Sampled:
    """Conductor, and at each sample the replicas of every block that is found."""

    def __init__(self, conductor):
        self._conductor = conductor
        self.samples: list[dict[bytes, int]] = []

    def handle(self, message, now: float):
        while now >= EVERY_S * len(self.samples):
            self.samples.append(self._conductor.view.pool.replicas())
        return self._conductor.handle(message, now)

    def series(self, until: float) -> Series:
        """Of the blocks with these ranks, until the last arrival."""
        samples = self.samples[: int(until / EVERY_S) + 1]
        total: Counter[bytes] = Counter()
        for sample in samples:
            total.update(sample)
        ranked = total.most_common(RANKS[-1])
        blocks = {rank: ranked[rank - 1][0] for rank in RANKS if rank <= len(ranked)}
        return {
            rank: [(EVERY_S * place, sample.get(block, 0)) for place, sample in enumerate(samples)]
            for rank, block in blocks.items()
        }


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    traces = {name: released(FLAGS, name) for name in TRACES}
    found = {name: replicas(trace.requests(), SETUP) for name, trace in traces.items()}
    conversation = traces["conversation"]
    others = {setup.label: replicas(conversation.requests(), setup) for setup in OTHERS}
    expected = {name: paper(name) for name in TRACES}
    headlines = [h for name in TRACES for h in headlines_of(found[name], expected[name], SETUP, traces[name].label)]
    for setup in OTHERS:
        headlines += headlines_of(others[setup.label], expected["conversation"], setup, conversation.label)
    sources = {"paper": expected, "fast25": found} | {s: {"conversation": series} for s, series in others.items()}
    rows = [
        {"source": source, "trace": name, "rank": rank, "time_s": at, "replicas": count}
        for source, of in sources.items()
        for name, series in of.items()
        for rank, points in series.items()
        for at, count in points
    ]
    return publish(
        FLAGS,
        claim=CLAIM,
        rows=rows,
        headlines=headlines,
        sensitivities=[] if FLAGS.quick else sensitivities(conversation.requests(), found["conversation"]),
        lessons=[
            "Nobody decides to replicate: each copy was made for a request that was quicker with it, and the "
            "hottest blocks come to lie nearly everywhere.",
            "That they stay there to the end, as in the paper, takes an eviction that counts uses: under LRU replicas "
            "of the 10th hottest block go where others were used last.",
        ],
        draw=lambda *panels: draw(panels, found, expected),
        panels=(2, 3),
        size=(11.0, 5.6),
    )


def replicas(requests, setup: Setup, **fields) -> Series:
    watched = []

    def host(node, actor):
        if node == CONDUCTOR:
            watched.append(actor := Sampled(actor))
        return actor

    serve(requests, setup, host, prefill=PREFILL, **fields)
    return watched[0].series(max(request.arrival for request in requests))


def paper(name: str) -> Series:
    series = papers(f"fast25_fig11_{name}")
    return {rank: [(float(x), int(y)) for x, y in series[f"{rank}th"]] for rank in RANKS}


def peaks(series: Series) -> dict[int, int]:
    return {rank: max(count for _, count in points) for rank, points in series.items()}


def order(series: Series) -> str:
    """Whether the peak falls with the rank, or stays."""
    found = list(peaks(series).values())
    return IN_ORDER if found == sorted(found, reverse=True) and found[0] > found[-1] else "does not"


def headlines_of(found: Series, expected: Series, setup: Setup, trace: str) -> list[Headline]:
    common = {"profile": setup.label, "trace": trace, "kind": setup.kind, "note": NOTE}
    targeted = "surrogate" not in trace
    ordered = same() if targeted and order(expected) == IN_ORDER else untargeted()  # there may be none to reproduce
    rows = [Headline("most replicas at a time", order(expected), order(found), ordered, **common)]
    for rank, points in found.items():
        limit = at_least(MOST) if rank == RANKS[0] and targeted else untargeted()
        block = f"replicas of the {rank}th hottest block, of {PREFILL} nodes"
        rows.append(Headline(f"most {block}", peaks(expected)[rank], peaks(found)[rank], limit, **common))
        if rank == RANKS[0]:
            rows.append(Headline(f"last {block}", expected[rank][-1][1], points[-1][1], limit, **common))
    return rows


def sensitivities(requests, found: Series) -> list[Sensitivity]:
    thresholds = (1.0, 2.0, 4.0)
    by_threshold = [
        found if threshold == 2.0 else replicas(requests, SETUP, kvcache_balancing_threshold=threshold)
        for threshold in thresholds
    ]
    nothing = replicas(requests, SETUP, policy="cache-aware")
    title = "most replicas of the {}th hottest block, conversation"
    return [
        Sensitivity(
            "kvcache_balancing_threshold (inf: nothing is copied)",
            [*thresholds, "inf"],
            title.format(rank),
            [peaks(series)[rank] for series in (*by_threshold, nothing)],
        )
        for rank in RANKS
    ]


def draw(panels, found: dict[str, Series], expected: dict[str, Series]) -> None:
    for column, name in enumerate(TRACES):
        for axes, of, source in ((panels[column], found, "ours"), (panels[column + len(TRACES)], expected, "FAST25")):
            for place, (rank, points) in enumerate(of[name].items()):
                line(axes, points, f"{rank}th", place, markers=False)
            axes.set(title=f"{name}, {source}", xlabel="time, s", ylabel="replicas", ylim=(-0.3, PREFILL + 0.3))
    panels[0].legend(ncols=2)


if __name__ == "__main__":
    run_script(main)
