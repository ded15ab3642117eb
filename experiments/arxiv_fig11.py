"""Report figure 11: P90 TTFT and TBT over their SLOs by request rate, ArXiv Summarization and L-Eval.

    python experiments/arxiv_fig11.py [--seeds=0,1,2,3]        # 4 minutes and a half

Claim: within both SLOs, Mooncake-[3P+1D] takes 20 % more requests than vLLM-[4M] on ArXiv Summarization and 40 % more
on L-Eval, where reuse is above 80 %; Mooncake-[2P+2D] less than vLLM on the former, more on the latter. Compared are
the rates at which the first of the two SLOs breaks. Expected: within 15 % on ArXiv Summarization; on L-Eval within 20 %
for [2P+2D] and vLLM. That [3P+1D] breaks the TBT SLO on L-Eval is out of reach: 72 tokens a request are no load for its
decoding instance, by any profile.

What decides: on ArXiv Summarization the speed of prefill (1.2 times as long, [3P+1D] takes 2.7 requests/s instead of
3.1), and of vLLM the cost of a request more in a step too; on L-Eval whether a question that comes while its document
is still in prefill has to compute it again, and of vLLM whether it caches prefixes. How many documents are asked about
at a time, and how often, is not known. All is fitted: the 0.6 ms of profile `arxiv` were chosen on this figure's TBT,
the documents, matching and vLLM's mode of L-Eval with its rates in sight, and so were 4,000 requests a rate on ArXiv
Summarization. Their number decides little: [3P+1D] takes 3.10, 3.13 and 3.05 requests/s of 1,000, 2,000 and 4,000; but
3.64 of 400, beyond the tolerance, as an overload of a few per cent needs time to show. Besides the report's rates 3.25
and 3.5 are tried: on one line from 3 to 4 the crossing came out 0.2 higher. That the paper's vLLM breaks the SLO of
TTFT on ArXiv Summarization, while its TBT stays below, is not explained by a largest batch (see the sweep).
"""

from collections.abc import Iterator
from dataclasses import replace
from statistics import mode
from typing import Any

from figure import Headline, Sensitivity, define_flags, parse, publish, run_script, seeds_of, share, untargeted
from poisson_rates import (
    COSTS,
    PROFILES,
    SYSTEMS,
    Found,
    Workload,
    crossing,
    draw_all,
    label,
    measure,
    papers_rate,
    papers_rates,
    rows_of,
)
from style import tick
from systems import request_ms, with_prefill_factor

from mooncake_jax.metrics import mean
from mooncake_jax.sched.cost import CostModel
from mooncake_jax.sched.profiles import profile

CLAIM = (
    "Mooncake-[3P+1D] takes 20 % (ArXiv Summarization) and 40 % (L-Eval) more requests than vLLM-[4M] within both SLOs."
)
# Two rates more, between the report's last, 3 and 4: a crossing there is else one of the line to the picture's edge.
ARXIV_RATES = tuple(sorted((*papers_rates("arxiv_fig11_arxivsum"), 3.25, 3.5)))
ARXIV = Workload("arxiv-summarization", "arxiv_fig11_arxivsum", ARXIV_RATES, 4000, 1, 1, "plain")
L_EVAL = Workload("l-eval", "arxiv_fig11_leval", papers_rates("arxiv_fig11_leval"), 1000, 6, 6, "plain")
WORKLOADS = (ARXIV, L_EVAL)
THREE, TWO, VLLM = SYSTEMS
PREFILL_FACTORS = (1, 1.1, 1.2)  # of the seconds that prefill computes
TOLERANCES = {(ARXIV, THREE): 0.15, (ARXIV, TWO): 0.15, (ARXIV, VLLM): 0.15, (L_EVAL, TWO): 0.2, (L_EVAL, VLLM): 0.2}
DECIDES = {
    (ARXIV, THREE): "the speed of prefill",
    (ARXIV, TWO): "the grid: P90 leaves the picture between 1.5 and 2 requests/s, and the line there meets 1 at 1.9",
    (ARXIV, VLLM): "the cost of a request more in a step, and the speed of prefill, which interrupts decoding",
    (L_EVAL, THREE): "how often a question meets its document in prefill",
    (L_EVAL, TWO): "how often a question meets its document in prefill",
    (L_EVAL, VLLM): "whether it caches prefixes",
}

CLAIMED = {ARXIV: "the claim's 20 % are of those rates", L_EVAL: "the claim's 40 % are of neither"}  # of [3P+1D]

FLAGS = define_flags("arxiv_fig11", seeds=4)


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    seeds = seeds_of(FLAGS)
    workloads = [tried(workload) for workload in WORKLOADS]
    ours = {(workload, profile): measure(workload, profile, seeds) for profile in PROFILES for workload in workloads}
    return publish(
        FLAGS,
        claim=CLAIM,
        rows=[row for (workload, profile), found in ours.items() for row in rows_of(workload, profile, found, seeds)],
        headlines=[
            one for (workload, profile), found in ours.items() for one in headlines(workload, profile, found, seeds)
        ],
        sensitivities=[] if FLAGS.quick else [*sensitivities(seeds)],
        lessons=[
            "A few hundred requests pass at rates that the cluster cannot serve, since an overload of some per cent "
            "takes time to show in P90; on ArXiv Summarization their number decides little beyond a thousand.",
            "A question that comes while its document is in prefill finds nothing to reuse, takes the full time, and "
            "makes that likelier for the next: beyond some rate reuse vanishes at once.",
        ],
        draw=lambda *panels: draw(panels, {one: ours[one, PROFILES[0]] for one in workloads}),
        panels=(2, 2),
        size=(9.0, 7.0),
    )


def tried(workload: Workload) -> Workload:
    return workload.quick() if FLAGS.quick else workload


def headlines(workload: Workload, profile: str, found: Found, seeds: tuple[int, ...]) -> Iterator[Headline]:
    base = next(one for one in WORKLOADS if one.name == workload.name)
    common = {"profile": profile, "trace": label(workload, seeds), "kind": "fitted"}
    means = {system: mean([crossing(ratios)[0] for ratios in by_seed]) for system, by_seed in found.items()}
    rows = {system: papers_rate(workload, system) for system in SYSTEMS}
    theirs = {system: float(row["y_interpolated_crossing_req_per_s"]) for system, row in rows.items()}
    for system in SYSTEMS:
        goal = share(TOLERANCES[base, system]) if (base, system) in TOLERANCES else untargeted()
        note = told(rows[system]["limited_by"], [crossing(ratios) for ratios in found[system]], DECIDES[base, system])
        yield Headline(rate_name(base, system), theirs[system], means[system], goal, **common, note=note)
    for system in (THREE, TWO):
        name = f"{system} over vLLM-[4M], {workload.name}"
        ours = means[system] / means[VLLM]
        tested = float(rows[system]["ratio_to_vllm_tested"])
        note = f"of crossings, as the rates above; of the largest rates tried in both SLOs the report's is {tested:g}"
        note += f"; {CLAIMED[base]}" if system == THREE else ""
        yield Headline(name, theirs[system] / theirs[VLLM], ours, untargeted(), **common, note=note)


def rate_name(workload: Workload, system: str) -> str:
    return f"rate within both SLOs, {workload.name}, {system}, requests/s"


def told(paper: str, found: list[tuple[float, str]], decides: str) -> str:
    """Which SLO breaks, how far the seeds lie apart, and what decides."""
    rates, breaking = zip(*found, strict=True)
    ours = " or ".join(sorted(set(breaking)))
    spread = f"seeds from {min(rates):.2f} to {max(rates):.2f}; broken by {ours}, the report's by {paper}"
    return f"{spread}; what decides is {decides}"


def sensitivities(seeds: tuple[int, ...]) -> Iterator[Sensitivity]:
    """Of the mean crossing, with one assumption changed at a time: of the requests on all seeds, else on two."""
    for workload, system, counts in (
        (ARXIV, THREE, (400, 1000, 2000)),
        (ARXIV, VLLM, (400, 1000)),
        (L_EVAL, TWO, (100, 300, 1000)),
    ):
        asked = [replace(workload, requests=count) for count in counts]
        results = [crossed(one, system, seeds) for one in asked]
        yield Sensitivity("requests at a rate", counts, rate_name(workload, system), results)
    seeds, shorter = seeds[:2], replace(ARXIV, requests=1000)
    few = f"{len(seeds)} seeds"
    batches = (24, 48, 256)
    results = [crossed(shorter, VLLM, seeds, max_batch=most) for most in batches]
    yield Sensitivity(f"vLLM's largest batch ({few}, 1,000 requests)", batches, rate_name(ARXIV, VLLM), results)
    slower = [with_prefill_factor(profile(PROFILES[0]), factor) for factor in PREFILL_FACTORS]
    about = f"prefill takes so many times as long ({few}, 1,000 requests)"
    for system in SYSTEMS:
        results = [crossed(shorter, system, seeds, cost) for cost in slower]
        yield Sensitivity(about, PREFILL_FACTORS, rate_name(ARXIV, system), results)
    for workload in (shorter, L_EVAL):
        results = [crossed(workload, VLLM, seeds, cost) for cost in COSTS]
        about = f"ms that a request more adds to a step ({few}, 1,000 requests)"
        yield Sensitivity(about, [*map(request_ms, COSTS)], rate_name(workload, VLLM), results)
    documents, questions, vllms = (2, 4, 8), (3, 6, 12), ("plain", "prefix_cache")
    results = [crossed(replace(L_EVAL, at_once=count), TWO, seeds) for count in documents]
    yield Sensitivity(f"documents asked about at a time ({few})", documents, rate_name(L_EVAL, TWO), results)
    results = [crossed(replace(L_EVAL, questions=count), TWO, seeds) for count in questions]
    yield Sensitivity(f"questions a document ({few})", questions, rate_name(L_EVAL, TWO), results)
    results = [crossed(L_EVAL, TWO, seeds, rematch=rematch) for rematch in (False, True)]
    yield Sensitivity(f"prefix matched again as prefill starts ({few})", ("no", "yes"), rate_name(L_EVAL, TWO), results)
    results = [crossed(replace(L_EVAL, vllm=vllm), VLLM, seeds) for vllm in vllms]
    yield Sensitivity(f"mode of vLLM ({few})", vllms, rate_name(L_EVAL, VLLM), results)


def crossed(
    workload: Workload, system: str, seeds: tuple[int, ...], cost: str | CostModel = PROFILES[0], **fields: Any
) -> float:
    [by_seed] = measure(workload, cost, seeds, [system], **fields).values()
    return mean([crossing(ratios)[0] for ratios in by_seed])


def draw(panels, ours: dict[Workload, Found]) -> None:
    """The rates of the table are marked on the SLO that breaks first, of most seeds: means of the seeds' crossings,
    which need not be where the means cross.
    """
    draw_all(panels, ours)
    for found, ttft, tbt in zip(ours.values(), panels[::2], panels[1::2], strict=True):
        axes = {"TTFT": ttft, "TBT": tbt}
        for place, by_seed in enumerate(found.values()):
            rates, breaking = zip(*map(crossing, by_seed), strict=True)
            if (what := mode(breaking)) in axes:
                tick(axes[what], (mean(rates), 1), place)
                axes[what].set_xlabel("requests/s (strokes on the line: the table's rates)")
    panels[2].legend(loc="center left", bbox_to_anchor=(0, 0.5))  # between the curves and the line of the SLO


if __name__ == "__main__":
    run_script(main)
