"""FAST25 figure 14: where the time of one request goes, by prompt length, with nothing and with 95 % reused.

    python experiments/fast25_fig14.py                                     # the paper's machine: a second
    python experiments/fast25_fig14.py --real [--model=smollm2-135m]       # this machine's engine: 2 minutes

Claim: prefill dominates TTFT and grows faster than the prompt; reusing 95 % takes nine tenths of it away; decoding
grows little. Expected: every prefill bar of profile `micro` within 5 %, every decoding bar within 3 % (it is fitted to
them), and each prefill bar within 5 % of what the other four predict. With --real the same is measured on the engine.
"""

from absl import flags
from clusters import MODEL, Trace, run
from figure import Headline, Sensitivity, at_most, define_flags, parse, points, publish, run_script, share, untargeted
from reference import points as papers
from style import bars, line

from mooncake_jax.model.architectures import ARCHITECTURES
from mooncake_jax.model.catalog import DEFAULT_MODEL_DIR
from mooncake_jax.sched.fitting import fit_prefill
from mooncake_jax.sched.profiles import profile
from mooncake_jax.workload.trace import TRACE_BLOCK, TraceRow

CLAIM = (
    "Prefill dominates TTFT and grows faster than the prompt; 95 % of reuse spares nine tenths; decoding barely grows."
)
K = 1024
REUSED = {"nothing reused": 0.0, "95 % reused": 0.95}
FILES = dict(zip(REUSED, ("fast25_fig14_prefix0", "fast25_fig14_prefix95"), strict=True))
PARTS = ("Schedule", "Prefill", "Transfer", "Load Cache", "Decode")
TTFT_PARTS = PARTS[:-1]
TOLERANCES = {"Prefill": share(0.05), "Decode": share(0.03)}
STEPS = 128
APART_S = 1000.0  # between two requests that are to meet an idle cluster
MICRO = profile("micro")
KV_BYTES = ARCHITECTURES[MODEL].kv_bytes_per_token("bfloat16")

FLAGS = define_flags("fast25_fig14", real=True)
flags.DEFINE_string("model", "smollm2-135m", "--real: a model's name or path", flag_values=FLAGS)
flags.DEFINE_string("model_dir", str(DEFAULT_MODEL_DIR), "--real: folder that models are kept in", flag_values=FLAGS)
flags.DEFINE_integer("longest", 2048, "--real: tokens of the longest prompt", lower_bound=256, flag_values=FLAGS)

Bars = dict[str, dict[str, list[tuple[int, float]]]]  # by reuse and part (tokens, seconds)


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    return measured() if FLAGS.real else simulated()


def paper() -> Bars:
    return {
        reuse: {part: [(int(k) * K, s) for k, s in found] for part, found in papers(file).items()}
        for reuse, file in FILES.items()
    }


def simulated() -> int:
    theirs = paper()
    lengths = [tokens for tokens, _ in theirs["nothing reused"]["Prefill"]]
    ours = {reuse: micro_bars(lengths, part_reused) for reuse, part_reused in REUSED.items()}
    ttfts = {reuse: simulated_ttft(lengths[-1], part_reused) for reuse, part_reused in REUSED.items()}
    return publish(
        FLAGS,
        claim=CLAIM,
        rows=[*rows_of(ours, "micro"), *rows_of(theirs, "paper")],
        headlines=[*bar_headlines(ours, theirs), *whole_headlines(ttfts, theirs)],
        sensitivities=[constant_term(theirs)],
        lessons=[
            f"Reusing 95 % of 128k tokens shortens TTFT by {100 * saved(ttfts):.0f} %: what is left is the load of the "
            "reused KVCache and attention over it, which reuse cannot spare."
        ],
        draw=lambda *panels: draw(panels, ours, theirs),
        panels=(1, 2),
        size=(9.0, 3.8),
    )


def micro_bars(lengths: list[int], part_reused: float) -> dict[str, list[tuple[int, float]]]:
    """Prefill, transfer, load and 128 steps of decoding, from the cost model alone."""
    parts = {
        "Prefill": lambda n: MICRO.prefill(n, int(part_reused * n)),
        "Transfer": lambda n: MICRO.transfer(n * KV_BYTES),
        "Load Cache": lambda n: MICRO.load(n * KV_BYTES),
        "Decode": lambda n: STEPS * MICRO.step(1, n + STEPS // 2),
    }
    return {part: [(n, seconds(n)) for n in lengths] for part, seconds in parts.items()}


def simulated_ttft(tokens: int, part_reused: float) -> float:
    """Of a request that has an idle cluster for itself: 1P+1D, transfers after the prefill as the figure shows them."""
    blocks = int(part_reused * tokens) // TRACE_BLOCK
    known = tuple(range(blocks))
    first = TraceRow(0.0, blocks * TRACE_BLOCK, 1, known, 0)
    whole = known + tuple(range(blocks, -(-tokens // TRACE_BLOCK)))
    second = TraceRow(APART_S * 1000, tokens, 1, whole, 1)
    rows = [first, second] if blocks else [second]
    served = run(Trace("one request", rows).requests(), "micro", prefill=1, decode=1, without=frozenset({"overlap"}))
    return next(outcome.ttft_s for outcome in served.outcomes if outcome.id == "1")


def bar_headlines(ours: Bars, theirs: Bars) -> list[Headline]:
    return [
        Headline(f"{part}, {n // K}k, {reuse}, s", expected, found, TOLERANCES[part], "micro", "one request", "fitted")
        for reuse in REUSED
        for part in TOLERANCES
        for (n, found), (_, expected) in zip(ours[reuse][part], theirs[reuse][part], strict=True)
    ]


def whole_headlines(ttfts: dict[str, float], theirs: Bars) -> list[Headline]:
    expected = {reuse: sum(theirs[reuse][part][-1][1] for part in TTFT_PARTS) for reuse in REUSED}
    common = {"profile": "micro", "trace": "one request", "kind": "fitted"}
    found = [
        Headline(f"TTFT, 128k, {reuse}, simulated, s", expected[reuse], ttfts[reuse], share(0.05), **common)
        for reuse in REUSED
    ]
    gained = "TTFT spared by reuse at 128k, simulated, %"
    found.append(Headline(gained, 100 * saved(expected), 100 * saved(ttfts), points(2), **common))
    prefills = theirs["nothing reused"]["Prefill"]
    note = "each length as a fit to the other four has it"
    worst = 100 * max(map(abs, left_out_errors(prefills)))
    common |= {"profile": "a + b n + c n²", "kind": "predicted"}
    return [
        *found,
        Headline("prefill from the four other lengths, worst error, %", None, worst, at_most(5), note=note, **common),
    ]


def saved(ttfts: dict[str, float]) -> float:
    nothing, most = (ttfts[reuse] for reuse in REUSED)
    return 1 - most / nothing


def left_out_errors(prefills: list[tuple[int, float]]) -> list[float]:
    """Of each length, relative, predicted by a fit to the others."""
    errors = []
    for place, (tokens, seconds) in enumerate(prefills):
        others = [(n, 0, s) for n, s in prefills[:place] + prefills[place + 1 :]]
        errors.append(predicted(fit_prefill(others), tokens) / seconds - 1)
    return errors


def predicted(coefficients: tuple[float, float, float], tokens: int) -> float:
    """Seconds of a prefill without reuse."""
    constant, linear, quadratic = coefficients
    return constant + tokens * (linear + 0.5 * quadratic * tokens)


def constant_term(theirs: Bars) -> Sensitivity:
    """`micro` has none, since figures 8 and 10 are met without one."""
    prefills = theirs["nothing reused"]["Prefill"]
    fits = {"none": MICRO.prefill_coefficients, "fitted": fit_prefill([(n, 0, s) for n, s in prefills])}
    worst = [100 * max(abs(predicted(fit, n) / s - 1) for n, s in prefills) for fit in fits.values()]
    return Sensitivity("constant term of a prefill", list(fits), "prefill, nothing reused, worst error, %", worst)


def rows_of(found: Bars, source: str) -> list[dict]:
    return [
        {"source": source, "reuse": reuse, "part": part, "prompt_tokens": n, "seconds": seconds}
        for reuse, parts in found.items()
        for part, points in parts.items()
        for n, seconds in points
    ]


def draw(panels, ours: Bars, theirs: Bars) -> None:
    for axes, reuse in zip(panels, REUSED, strict=True):
        groups = [f"{n // K}k" for n, _ in ours[reuse]["Prefill"]]
        heights, marks = ({part: [s for _, s in of[reuse][part]] for part in ours[reuse]} for of in (ours, theirs))
        bars(axes, groups, heights, marks, paper_label="FAST25")
        axes.set(title=reuse, xlabel="prompt length, tokens", ylabel="seconds (Decode: 128 steps)", yscale="log")
    panels[0].legend()


def measured() -> int:
    from machine_engine import MachineEngine  # it brings JAX, which nothing else here wants

    lengths = [FLAGS.longest // 4, FLAGS.longest] if FLAGS.quick else [FLAGS.longest // 2**i for i in (4, 3, 2, 1, 0)]
    engine = MachineEngine(FLAGS.model, FLAGS.model_dir, {"longest": lengths[-1]})
    ours: Bars = {}
    for reuse, part in REUSED.items():
        prefills = engine.prefills((tokens, int(part * tokens)) for tokens in lengths)
        ours[reuse] = {"Prefill": [*zip(lengths, prefills, strict=True)]}
    steps = engine.steps((1, tokens) for tokens in lengths)
    ours["nothing reused"]["Decode"] = [(n, STEPS * seconds) for n, seconds in zip(lengths, steps, strict=True)]
    theirs = paper()
    part_saved = {
        source: 100 * (1 - of["95 % reused"]["Prefill"][-1][1] / of["nothing reused"]["Prefill"][-1][1])
        for source, of in (("paper", theirs), ("ours", ours))
    }
    machine = f"this machine, {FLAGS.model}"
    headline = Headline(
        "prefill spared by 95 % reuse at the longest, %",
        part_saved["paper"],
        part_saved["ours"],
        untargeted(),
        machine,
        "one request",
        "predicted",
        f"another model and machine, and a longest prompt of {lengths[-1]} tokens instead of 131,072",
    )
    return publish(
        FLAGS,
        claim=CLAIM,
        rows=[*rows_of(ours, machine), *rows_of(theirs, "paper")],
        headlines=[headline],
        lessons=[f"On this machine's engine reuse of 95 % spares {part_saved['ours']:.0f} % of the longest prefill."],
        draw=lambda *panels: draw_measured(panels, ours, theirs),
        panels=(1, 2),
        size=(8.0, 3.6),
    )


def draw_measured(panels, ours: Bars, theirs: Bars) -> None:
    """Over the longest, since machines and models differ."""
    for axes, part in zip(panels, TOLERANCES, strict=True):
        for is_paper, of in ((False, ours), (True, theirs)):
            longest, most = of["nothing reused"][part][-1]
            for place, (reuse, parts) in enumerate((reuse, parts) for reuse, parts in of.items() if part in parts):
                shares = [(n / longest, seconds / most) for n, seconds in parts[part]]
                line(axes, shares, f"{reuse}, {'FAST25' if is_paper else 'measured'}", place, paper=is_paper)
        axes.set_xscale("log", base=2)
        axes.set(title=part, xlabel="prompt length / the longest", ylabel="seconds / the longest's, nothing reused")
        axes.legend()


if __name__ == "__main__":
    run_script(main)
