"""FAST25 figure 8: GPU time of prefill, a request, of Mooncake and three kinds of vLLM on three traces.

    python experiments/fast25_fig08.py --traces=DIR [--seeds=0,1,2,3]        # 2.5 minutes

Claim: with a global cache Mooncake computes 36, 53 and 64 % less than vLLM, whose own prefix cache is small and that of
one node, and whose chunked prefill costs more. Expected: seconds within 5 %, ratios to Mooncake within 0.15. Only
computation counts, no loading and no host. tool&agent is a surrogate unless the released trace is there: no target (of
its seeds `micro` takes the first). Synthetic's bars are fitted: prompts over 128k tokens are left out because of them.
"""

from dataclasses import replace
from statistics import fmean

from clusters import completed
from figure import Headline, Sensitivity, define_flags, parse, points, publish, run_script, share, untargeted
from reference import points as papers
from style import bars
from systems import (
    CALIBRATIONS,
    CHUNKED,
    MICRO,
    MOONCAKE,
    NAMED,
    PREFIX,
    SYSTEMS,
    VLLM,
    label_of,
    serve,
    taken,
    workloads,
)

from mooncake_jax.sched.cost import PolynomialCost
from mooncake_jax.sched.profiles import profile
from mooncake_jax.simulate.run import Run

CLAIM = "With a global cache Mooncake's prefill takes 36 to 64 % less GPU time than vLLM's, which has at most its own."
WORKLOADS = {"Conversation": "conversation", "Tool&Agent": "toolagent", "Synthetic": "synthetic"}
TARGETED = ("Conversation", "Synthetic")
PAPER = {system: dict(found) for system, found in papers("fast25_fig08").items()}
NOTES = {
    (CHUNKED, NAMED): "60 ms a chunk of 2,048 tokens are chosen on the conversation's bar",
    (CHUNKED, MICRO): "no cost of a chunk: what the paper's bar has more than plain vLLM's is that",
    (PREFIX, NAMED): "what a node's memory leaves for its cache decides, and a router that does not know of it",
    (PREFIX, MICRO): "steps are short here: fewer requests run at once and leave the cache more memory",
}
LEFT_OUT = "that prompts over 128k tokens are left out is chosen on these bars (sensitivities)"
CHUNK_MS = (30, 60, 90)  # of a chunk of 2,048 tokens; the profile has 60

FLAGS = define_flags("fast25_fig08", traces=True, seeds=4)

Seconds = dict[tuple[str, str, str], list[float]]  # of a trace each, by calibration, workload and system


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    traces = {workload: workloads(FLAGS, name) for workload, name in WORKLOADS.items()}
    labels = {(NAMED, workload): label_of(of) for workload, of in traces.items()}
    labels |= {(MICRO, workload): label_of(of[:1]) for workload, of in traces.items()}
    found: Seconds = {}
    for workload, of in traces.items():
        requests = [taken(trace.requests()) for trace in of]
        for calibration in CALIBRATIONS:
            for system in SYSTEMS:
                some = requests if calibration == NAMED else requests[:1]  # one seed of a surrogate
                found[calibration, workload, system] = [gpu_seconds(serve(system, r, calibration)) for r in some]
    spared = [100 * (1 - mean(found, NAMED, w, MOONCAKE) / mean(found, NAMED, w, VLLM)) for w in WORKLOADS]
    return publish(
        FLAGS,
        claim=CLAIM,
        rows=rows_of(found),
        headlines=[
            headline for c in CALIBRATIONS for w in WORKLOADS for headline in headlines(found, labels[c, w], c, w)
        ],
        sensitivities=sensitivities(found, traces),
        lessons=[
            "Mooncake's prefill takes {:.0f}, {:.0f} and {:.0f} % less GPU time than vLLM's.".format(*spared),
            "A prefix cache in what is left of a node's own memory spares little: few of a conversation's next turns "
            "meet their node again, and by then their blocks have gone.",
        ],
        draw=lambda axes: draw(axes, found, labels),
        size=(7.0, 3.6),
    )


def gpu_seconds(served: Run) -> float:
    return served.hardware["prefill_compute_s_mean"]


def mean(found: Seconds, calibration: str, workload: str, system: str) -> float:
    return fmean(found[calibration, workload, system])


def headlines(found: Seconds, label: str, calibration: str, workload: str) -> list[Headline]:
    made = []
    for system, of in SYSTEMS.items():
        chunks = calibration == NAMED and system == CHUNKED and workload == "Conversation"
        fitted = chunks or workload == "Synthetic"
        common = {"profile": of.profile_in(calibration), "trace": label, "kind": "fitted" if fitted else "predicted"}
        notes = (NOTES.get((system, calibration), ""), LEFT_OUT if workload == "Synthetic" else "")
        common |= {"note": "; ".join(filter(None, notes))}
        aimed = workload in TARGETED
        expected, seconds = PAPER[system][workload], mean(found, calibration, workload, system)
        name = f"prefill of {system}, {workload}"
        made.append(Headline(f"{name}, GPU s", expected, seconds, share(0.05) if aimed else untargeted(), **common))
        if system != MOONCAKE:
            ratio = seconds / mean(found, calibration, workload, MOONCAKE)
            printed = expected / PAPER[MOONCAKE][workload]
            tolerance = points(0.15) if aimed else untargeted()
            made.append(Headline(f"{name}, over Mooncake's", printed, ratio, tolerance, **common))
    return made


def sensitivities(found: Seconds, traces: dict) -> list[Sensitivity]:
    """Each on the trace where it matters most."""
    synthetic, conversation = (traces[workload][0].requests() for workload in ("Synthetic", "Conversation"))
    ours = mean(found, NAMED, "Synthetic", MOONCAKE)
    whole = gpu_seconds(serve(MOONCAKE, synthetic))
    sizes = [400_000, 800_000, 1_300_000, 2_600_000]
    served = [serve(PREFIX, taken(conversation), device_kv_tokens=tokens) for tokens in sizes]
    prefix = f"prefill of {PREFIX}, Conversation"
    few, many = (gpu_seconds(serve(CHUNKED, taken(conversation), cost=with_chunk_ms(CHUNK_MS[at]))) for at in (0, -1))
    chunks = (few, mean(found, NAMED, "Conversation", CHUNKED), many)
    return [
        Sensitivity(
            "ms that a chunk of 2,048 tokens adds", CHUNK_MS, f"prefill of {CHUNKED}, Conversation, GPU s", chunks
        ),
        Sensitivity(
            "prompts over 128k tokens", ["left out", "served"], "prefill of Mooncake, Synthetic, GPU s", [ours, whole]
        ),
        Sensitivity("KVCache in a node's devices, tokens", sizes, f"{prefix}, GPU s", [gpu_seconds(r) for r in served]),
        Sensitivity("KVCache in a node's devices, tokens", sizes, f"{prefix}, hit rate", [hit_rate(r) for r in served]),
    ]


def with_chunk_ms(added: float) -> PolynomialCost:
    """As a cost of each token, since a prompt's chunks only show as a sum."""
    constant, linear, quadratic = profile(SYSTEMS[VLLM].profile).prefill_coefficients
    dearer = (constant, linear + added / 1000 / 2048, quadratic)
    return replace(profile(SYSTEMS[CHUNKED].profile), prefill_coefficients=dearer)


def hit_rate(served: Run) -> float:
    """In tokens."""
    done = completed(served.outcomes)
    return sum(outcome.reused_tokens for outcome in done) / sum(outcome.prompt_tokens for outcome in done)


def rows_of(found: Seconds) -> list[dict]:
    ours = [
        {"source": calibration, "workload": w, "system": s, "trace": place, "gpu_s": seconds}
        for (calibration, w, s), of in found.items()
        for place, seconds in enumerate(of)
    ]
    return ours + [
        {"source": "paper", "workload": w, "system": s, "gpu_s": seconds}
        for s, of in PAPER.items()
        for w, seconds in of.items()
    ]


def draw(axes, found: Seconds, labels: dict[tuple[str, str], str]) -> None:
    means = {s: [mean(found, NAMED, w, s) for w in WORKLOADS] for s in SYSTEMS}
    spread = {s: [(min(of), max(of)) for of in (found[NAMED, w, s] for w in WORKLOADS)] for s in SYSTEMS}
    marks = {s: [PAPER[s][w] for w in WORKLOADS] for s in SYSTEMS}
    groups = [f"{w}\n(ours: surrogate)" if "surrogate" in labels[NAMED, w] else w for w in WORKLOADS]
    bars(axes, groups, means, marks, spread=spread, paper_label="FAST25")
    axes.set(ylabel="prefill GPU time, s a request", title="profiles fast25, vllm051, vllm051-chunked")
    axes.legend()


if __name__ == "__main__":
    run_script(main)
