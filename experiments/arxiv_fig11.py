"""Report figure 11: P90 TTFT and TBT over their SLOs by request rate, ArXiv Summarization and L-Eval.

    python experiments/arxiv_fig11.py [--seeds=0,1,2,3]        # 6 minutes

Claim: within both SLOs, Mooncake-[3P+1D] takes 20 % more requests than vLLM-[4M] on ArXiv Summarization and 40 % more
on L-Eval, where reuse is above 80 %; Mooncake-[2P+2D] less than vLLM on the former, more on the latter. Compared are
the rates at which the first of the two SLOs breaks. Expected: within 15 % on ArXiv Summarization; on L-Eval within 20 %
for [2P+2D] and vLLM. That [3P+1D] breaks the TBT SLO on L-Eval is out of reach: 72 tokens a request are no load for its
decoding instance, by any profile.

What decides: on ArXiv Summarization how many requests a rate is tried with (an overload of a few per cent needs time to
show); on L-Eval whether a question that comes while its document is still in prefill has to compute it again. How many
documents are asked about at a time is not known, and was chosen for [2P+2D] on L-Eval. That the paper's vLLM breaks
the SLO of TTFT on ArXiv Summarization, while its TBT stays below, is not explained by a largest batch (see the sweep).
"""

from collections.abc import Iterator
from dataclasses import replace

from figure import Headline, Sensitivity, define_flags, parse, publish, run_script, seeds_of, share, untargeted
from poisson_rates import SYSTEMS, Found, Workload, crossing, draw_ratios, measure, rows_of
from reference import rows as paper_rows

from mooncake_jax.metrics import mean

CLAIM = (
    "Mooncake-[3P+1D] takes 20 % (ArXiv Summarization) and 40 % (L-Eval) more requests than vLLM-[4M] within both SLOs."
)
ARXIV = Workload("arxiv-summarization", "arxiv_fig11_arxivsum", (0.5, 0.8, 1, 1.5, 2, 2.5, 3, 4), 4000, 1, 1, "plain")
L_EVAL = Workload("l-eval", "arxiv_fig11_leval", (0.1, 0.2, 0.5, 0.8, 1, 1.25, 1.5, 1.75, 2), 1000, 6, 6, "plain")
WORKLOADS = (ARXIV, L_EVAL)
PROFILES = ("arxiv", "micro")
THREE, TWO, VLLM = SYSTEMS
TOLERANCES = {(ARXIV, THREE): 0.15, (ARXIV, TWO): 0.15, (ARXIV, VLLM): 0.15, (L_EVAL, TWO): 0.2, (L_EVAL, VLLM): 0.2}
DECIDES = {
    ARXIV: "how many requests a rate is tried with, and where between 3 and 4 requests/s P90 leaves the picture",
    L_EVAL: "how often a question meets its document in prefill; of vLLM, how much the prompts' lengths spread",
}
FITTED = {(L_EVAL, TWO)}  # by the documents that are asked about at a time

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
        headlines=[one for (workload, profile), found in ours.items() for one in headlines(workload, profile, found)],
        sensitivities=[] if FLAGS.quick else [*sensitivities(seeds)],
        lessons=[
            "How long a test is decides what rate passes it: a few per cent more than the cluster can serve take "
            "hundreds of requests to show in P90.",
            "A question that comes while its document is in prefill finds nothing to reuse, takes the full time, and "
            "makes that likelier for the next: beyond some rate reuse vanishes at once.",
        ],
        draw=lambda *panels: draw(panels, {one: ours[one, PROFILES[0]] for one in workloads}),
        panels=(2, 2),
        size=(9.0, 7.0),
    )


def tried(workload: Workload) -> Workload:
    return workload.quick() if FLAGS.quick else workload


def papers_crossing(workload: Workload, system: str) -> tuple[float, str]:
    """Of the lines in the report's figure, and the SLO that breaks there."""
    name = workload.paper.removeprefix("arxiv_fig11_")
    [row] = [
        row for row in paper_rows("arxiv_fig11_12_max_rates") if (row["workload"], row["series"]) == (name, system)
    ]
    return float(row["y_interpolated_crossing_req_per_s"]), row["limited_by"]


def headlines(workload: Workload, profile: str, found: Found) -> Iterator[Headline]:
    base = next(one for one in WORKLOADS if one.name == workload.name)
    trace = f"{workload.name}, generated"
    means = {system: mean([crossing(ratios)[0] for ratios in by_seed]) for system, by_seed in found.items()}
    theirs = {system: papers_crossing(workload, system) for system in SYSTEMS}
    for system in SYSTEMS:
        goal = share(TOLERANCES[base, system]) if (base, system) in TOLERANCES else untargeted()
        kind = "fitted" if (base, system) in FITTED else "predicted"
        name = f"rate within both SLOs, {workload.name}, {system}, requests/s"
        note = told(theirs[system][1], [crossing(ratios) for ratios in found[system]], DECIDES[base])
        yield Headline(name, theirs[system][0], means[system], goal, profile, trace, kind, note)
    for system in (THREE, TWO):
        name = f"{system} over vLLM-[4M], {workload.name}"
        paper = theirs[system][0] / theirs[VLLM][0]
        yield Headline(name, paper, means[system] / means[VLLM], untargeted(), profile, trace, "predicted")


def told(paper: str, found: list[tuple[float, str]], decides: str) -> str:
    """Which SLO breaks, how far the seeds lie apart, and what decides."""
    rates, breaking = zip(*found, strict=True)
    ours = " or ".join(sorted(set(breaking)))
    spread = f"seeds from {min(rates):.2f} to {max(rates):.2f}; broken by {ours}, the report's by {paper}"
    return f"{spread}; what decides is {decides}"


def sensitivities(seeds: tuple[int, ...]) -> Iterator[Sensitivity]:
    """Of the mean crossing, with one assumption changed at a time, on two of the seeds."""
    seeds = seeds[:2]
    for system in (THREE, VLLM):
        name = f"rate within both SLOs, {ARXIV.name}, {system}, requests/s"
        counts = (200, 400, 1000, 2000)
        results = [crossed(replace(ARXIV, requests=count), system, seeds) for count in counts]
        yield Sensitivity("requests at a rate", counts, name, results)
    batches = (24, 48, 256)
    results = [crossed(replace(ARXIV, requests=1000), VLLM, seeds, max_batch=most) for most in batches]
    yield Sensitivity("vLLM's largest batch", batches, name, results)
    name = f"rate within both SLOs, {L_EVAL.name}, {TWO}, requests/s"
    documents = (2, 4, 8)
    results = [crossed(replace(L_EVAL, at_once=count), TWO, seeds) for count in documents]
    yield Sensitivity("documents asked about at a time", documents, name, results)
    results = [crossed(L_EVAL, TWO, seeds, rematch=rematch) for rematch in (False, True)]
    yield Sensitivity("prefix matched again as prefill starts", ("no", "yes"), name, results)
    modes = ("plain", "prefix_cache")
    results = [crossed(replace(L_EVAL, vllm=mode), VLLM, seeds) for mode in modes]
    yield Sensitivity("mode of vLLM", modes, f"rate within both SLOs, {L_EVAL.name}, {VLLM}, requests/s", results)


def crossed(workload: Workload, system: str, seeds: tuple[int, ...], **fields) -> float:
    [by_seed] = measure(workload, PROFILES[0], seeds, [system], **fields).values()
    return mean([crossing(ratios)[0] for ratios in by_seed])


def draw(panels, ours: dict[Workload, Found]) -> None:
    places = iter(panels)
    for workload, found in ours.items():
        for what in ("ttft", "tbt"):
            draw_ratios(next(places), workload, what, found)
    panels[2].legend(loc="upper left")


if __name__ == "__main__":
    run_script(main)
