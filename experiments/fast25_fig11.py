"""FAST25 figure 11: how many replicas hot blocks have, over an hour of traffic.

    python experiments/fast25_fig11.py --traces=DIR [--seeds=0,1,2,3]            # 77 s of CPU

Claim: Algorithm 1 copies hot blocks to most prefill nodes, and cold ones come and go. Expected: on the conversation
trace the 10th hottest block is on all 8 prefill nodes at a time, and peaks fall with the rank, as in the paper; but
with LRU replicas do not stay as they do there (with LFU, chosen on this figure, they do), and on synthetic that block
comes to lie on 4 nodes, in the paper on 5. There it is in 16 prompts, and none of its replicas is evicted: that so few
of these prompts meet a full queue decides. With 1.5 times the arrivals it comes to 5 nodes, with twice as many to 6.
tool&agent is a surrogate of four seeds where the trace is not there: no target. Blocks are ranked as in the paper: by
the replicas that all samples, one each 30 s, have found of them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from fast25_cluster import Setup, faster, serve
from figure import Headline, Sensitivity, at_least, define_flags, parse, publish, run_script, same, untargeted
from reference import points as papers
from sampling import Sampled
from style import line
from systems import label_of, workloads

from mooncake_jax.request import Request
from mooncake_jax.sched.messages import CONDUCTOR

CLAIM = (
    "Blocks that many prompts begin with come to lie on most prefill nodes by themselves; rarely used ones do not stay."
)
CONVERSATION = "conversation"
TRACES = (CONVERSATION, "toolagent", "synthetic")
TARGETED = (CONVERSATION, "synthetic")
EVERY_S = 30.0
RANKS = (10, 100, 1000, 10_000)
PREFILL = 8
MOST = 5  # of PREFILL nodes: more than half
IN_ORDER = "falls with the rank"
SETUP = Setup("fast25", "fast25", "predicted", {})
OTHERS = (  # on the conversation trace
    Setup("micro", "micro", "predicted", {}),
    Setup("fast25, LFU", "fast25", "fitted", {"eviction": "lfu"}),
)
NOTE = (
    "a copy is made for a request that is quicker with it: how often prompts of one prefix meet full queues decides, "
    "and so the load (sensitivities)"
)
EVICTED = (
    "eviction decides: nodes drop their replicas where other blocks were used later (LRU); with LFU, chosen on this "
    "figure, they stay"
)
KEPT = (
    "in the end there are as many as there ever were at a time: how often prompts of one prefix meet full queues "
    "decides, and so the load (sensitivities)"
)
Series = dict[int, list[tuple[float, float]]]  # by rank (seconds, replicas)

FLAGS = define_flags("fast25_fig11", traces=True, seeds=4)


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    traces = {name: workloads(FLAGS, name) for name in TRACES}
    labels = {name: label_of(some) for name, some in traces.items()}
    found = {name: [replicas(trace.requests(), SETUP) for trace in some] for name, some in traces.items()}
    requests = {name: traces[name][0].requests() for name in TARGETED}
    others = {setup.label: [replicas(requests[CONVERSATION], setup)] for setup in OTHERS}
    expected = {name: paper(name) for name in TRACES}
    headlines = [h for name in TRACES for h in headlines_of(found[name], expected[name], SETUP, labels[name])]
    for setup in OTHERS:
        headlines += headlines_of(others[setup.label], expected[CONVERSATION], setup, labels[CONVERSATION])
    papers_ = {name: [series] for name, series in expected.items()}
    sources = {"paper": papers_, "fast25": found} | {s: {CONVERSATION: some} for s, some in others.items()}
    rows = [
        {"source": source, "trace": name, "run": run, "rank": rank, "time_s": at, "replicas": count}
        for source, of in sources.items()
        for name, some in of.items()
        for run, series in enumerate(some)
        for rank, points in series.items()
        for at, count in points
    ]
    return publish(
        FLAGS,
        claim=CLAIM,
        rows=rows,
        headlines=headlines,
        sensitivities=[] if FLAGS.quick else sensitivities(requests, found),
        lessons=[
            "Nobody decides to replicate: each copy was made for a request that was quicker with it, and the "
            "hottest blocks come to lie nearly everywhere.",
            "That they stay there to the end, as in the paper, takes an eviction that counts uses: under LRU replicas "
            "of the 10th hottest block go where others were used last.",
        ],
        draw=lambda *panels: draw(panels, found, expected, labels),
        panels=(2, 3),
        size=(11.0, 5.6),
    )


def replicas(requests, setup: Setup, **fields) -> Series:
    watched = []

    def host(node, actor):
        if node == CONDUCTOR:
            watched.append(actor := Sampled(actor, EVERY_S, lambda view, _: view.pool.replicas()))
        return actor

    serve(requests, setup, host, prefill=PREFILL, **fields)
    last = max(request.arrival for request in requests)
    return series_of(watched[0].samples[: int(last / EVERY_S) + 1])


def series_of(samples: Sequence[Mapping[bytes, int]]) -> Series:
    """Of the blocks with these ranks. samples: the replicas of every block that is found."""
    total: Counter[bytes] = Counter()
    for sample in samples:
        total.update(sample)
    ranked = total.most_common(RANKS[-1])
    blocks = {rank: ranked[rank - 1][0] for rank in RANKS if rank <= len(ranked)}
    return {
        rank: [(EVERY_S * place, sample.get(block, 0)) for place, sample in enumerate(samples)]
        for rank, block in blocks.items()
    }


def paper(name: str) -> Series:
    series = papers(f"fast25_fig11_{name}")
    return {rank: [(float(x), int(y)) for x, y in series[f"{rank}th"]] for rank in RANKS}


def peaks(some: Sequence[Series]) -> dict[int, float]:
    """By rank, the mean of all runs."""
    ranks = [rank for rank in some[0] if all(rank in series for series in some)]
    return {rank: fmean(max(count for _, count in series[rank]) for series in some) for rank in ranks}


def last(some: Sequence[Series], rank: int) -> float:
    return fmean(series[rank][-1][1] for series in some)


def order(some: Sequence[Series]) -> str:
    """Whether the peak falls with the rank, or stays."""
    found = list(peaks(some).values())
    return IN_ORDER if found == sorted(found, reverse=True) and found[0] > found[-1] else "does not"


def headlines_of(found: Sequence[Series], expected: Series, setup: Setup, trace: str) -> list[Headline]:
    common = {"profile": setup.label, "trace": trace, "kind": setup.kind}
    targeted, theirs, ours = "surrogate" not in trace, peaks([expected]), peaks(found)
    ordered = same() if targeted and order([expected]) == IN_ORDER else untargeted()  # there may be none to reproduce
    rows = [Headline("most replicas at a time", order([expected]), order(found), ordered, note=NOTE, **common)]
    for rank, most in ours.items():
        limit = at_least(MOST) if rank == RANKS[0] and targeted else untargeted()
        block = f"replicas of the {rank}th hottest block, of {PREFILL} nodes"
        rows.append(Headline(f"most {block}", theirs[rank], most, limit, note=NOTE, **common))
        if rank == RANKS[0]:
            left = last(found, rank)
            note = EVICTED if left < most else KEPT
            rows.append(Headline(f"last {block}", expected[rank][-1][1], left, limit, note=note, **common))
    return rows


def sensitivities(requests: dict[str, list[Request]], found: dict[str, list[Series]]) -> list[Sensitivity]:
    thresholds = (1.0, 2.0, 4.0)
    made = []
    for name, some in requests.items():
        runs = [
            found[name][0] if threshold == 2.0 else replicas(some, SETUP, kvcache_balancing_threshold=threshold)
            for threshold in thresholds
        ]
        runs.append(replicas(some, SETUP, policy="cache-aware"))
        made += [
            Sensitivity(
                "kvcache_balancing_threshold (inf: nothing is copied)",
                [*thresholds, "inf"],
                f"most replicas of the {rank}th hottest block, {name}",
                [peaks([series])[rank] for series in runs],
            )
            for rank in (RANKS if name == CONVERSATION else RANKS[:1])
        ]
    return [*made, *loads(requests["synthetic"], found["synthetic"][0])]


def loads(requests: Sequence[Request], known: Series) -> list[Sensitivity]:
    """Of the synthetic trace, where the hottest blocks come to lie on fewer nodes than the paper's. known: as it is."""
    speeds, factors = (0.8, 1.0, 1.25, 1.5, 2.0), (1.0, 1.1, 1.25, 1.5)
    by_speed = [known if x == 1.0 else replicas(faster(requests, x), SETUP) for x in speeds]
    by_factor = [known if x == 1.0 else replicas(requests, SETUP.changed(prefill_factor=x)) for x in factors]
    made = []
    for assumption, values, runs in (
        ("how many times as fast the trace is replayed", speeds, by_speed),
        ("how many times as long prefill computes (MFU)", factors, by_factor),
    ):
        results = [peaks([series])[RANKS[0]] for series in runs]
        made.append(
            Sensitivity(assumption, values, f"most replicas of the {RANKS[0]}th hottest block, synthetic", results)
        )
    return made


def means(some: Sequence[Series], rank: int) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(time, mean of all runs), and the least and the greatest of them."""
    together = list(zip(*(series[rank] for series in some), strict=False))  # until the first run's end
    counts = [[count for _, count in at] for at in together]
    times = [at[0][0] for at in together]
    return list(zip(times, map(fmean, counts), strict=True)), [(min(of), max(of)) for of in counts]


def draw(panels, found: dict[str, list[Series]], expected: dict[str, Series], labels: dict[str, str]) -> None:
    for column, name in enumerate(TRACES):
        ours, theirs = panels[column], panels[column + len(TRACES)]
        for place, rank in enumerate(peaks(found[name])):
            points, ends = means(found[name], rank)
            line(ours, points, f"{rank}th", place, markers=False)
            if len(found[name]) > 1:
                some = slice(5 * place, None, 20)  # each series at times of its own, or nobody can tell them apart
                for point, end in zip(points[some], ends[some], strict=True):
                    line(ours, [point], "_", place, markers=False, spread=[end])
        for place, (rank, points) in enumerate(expected[name].items()):
            line(theirs, points, f"{rank}th", place, markers=False)
        surrogate = ", surrogate: mean and ends of seeds" if "surrogate" in labels[name] else ""
        for axes, source in ((ours, f"ours, profile {SETUP.label}{surrogate}"), (theirs, "FAST25")):
            axes.set(title=f"{name}, {source}", xlabel="time, s", ylabel="replicas", ylim=(-0.3, PREFILL + 0.3))
    panels[0].legend(ncols=2)


if __name__ == "__main__":
    run_script(main)
