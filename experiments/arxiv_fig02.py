"""Figure 2 of the report: prefill by length and decoding by batch, latency and throughput, each over its largest.

    python experiments/arxiv_fig02.py                                  # a model of the paper's machine: a second
    python experiments/arxiv_fig02.py --real [--model=smollm2-135m]    # this machine's engine: 3 minutes

Claim: prefill's latency grows faster than the prompt, so that its throughput falls; decoding's grows so little with the
batch that 16 requests have 13 times the throughput of one. Expected: both shapes within 3 % at every point with
what is fitted to this figure. `micro` is a little beyond: its prefill is fitted to FAST25 figure 14, which has 8 % less
between 8k and 128k than this figure, and its decoding to both.
"""

from absl import flags
from figure import Headline, Sensitivity, at_most, define_flags, parse, publish, run_script, untargeted
from reference import points as paper_points
from style import line

from mooncake_jax.model.catalog import DEFAULT_MODEL_DIR
from mooncake_jax.sched.fitting import fit_prefill, fit_step
from mooncake_jax.sched.profiles import profile

CLAIM = "Prefill's throughput falls with the length of the prompt; decoding's grows almost as the batch does."
K = 1024
CONTEXT = 8 * K  # tokens of each request that decodes
PHASES = ("prefill", "decode")
MEASURES = ("latency", "throughput")
WORST = 0.03
SHAPE = {"prefill": "prefill, worst error of the shape", "decode": "decoding, worst error of the shape"}
FITTED = "report figure 2"
NOTES = {
    "prefill": "FAST25 figure 14, which `micro` is fitted to, has 1 : 27.5 between 8k and 128k, this figure 1 : 29.7",
    "decode": "the report's curve is flat up to 3 requests and has a peak at 14, which no line follows",
}
MICRO = profile("micro")

FLAGS = define_flags("arxiv_fig02", real=True)
flags.DEFINE_string("model", "smollm2-135m", "--real: a model's name or path", flag_values=FLAGS)
flags.DEFINE_string("model_dir", str(DEFAULT_MODEL_DIR), "--real: folder that models are kept in", flag_values=FLAGS)
flags.DEFINE_integer("longest", 4096, "--real: tokens of the longest prompt", lower_bound=64, flag_values=FLAGS)
flags.DEFINE_integer("context", 512, "--real: tokens of each that decodes", lower_bound=16, flag_values=FLAGS)
flags.DEFINE_integer("max_batch", 16, "--real: most requests that decode", lower_bound=1, flag_values=FLAGS)

Points = list[tuple[float, float]]  # tokens or requests, seconds (or any unit of time)
Curves = dict[tuple[str, str], Points]  # by phase and measure, each over its largest


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    return measured() if FLAGS.real else simulated()


def paper() -> Curves:
    found = {}
    for phase, unit in (("prefill", K), ("decode", 1)):
        for series, points in paper_points(f"arxiv_fig02_{phase}").items():
            found[phase, series.removeprefix(f"{phase}_")] = [(int(x * unit), y) for x, y in points]
    return found


def curves(prefill: Points, decode: Points) -> Curves:
    """Of seconds by tokens, and of seconds by requests."""
    found = {}
    for phase, seconds in (("prefill", prefill), ("decode", decode)):
        found[phase, "latency"] = over_largest(seconds)
        found[phase, "throughput"] = over_largest([(x, x / s) for x, s in seconds])
    return found


def over_largest(points: Points) -> Points:
    largest = max(y for _, y in points)
    return [(x, y / largest) for x, y in points]


def simulated() -> int:
    theirs = paper()
    lengths, batches = ([x for x, _ in theirs[phase, "latency"]] for phase in PHASES)
    micro = curves([(n, MICRO.prefill(n, 0)) for n in lengths], [(b, MICRO.step(b, b * CONTEXT)) for b in batches])
    fitted = fitted_curves(theirs)
    return publish(
        FLAGS,
        claim=CLAIM,
        rows=[row for name, of in (("micro", micro), (FITTED, fitted), ("paper", theirs)) for row in rows_of(name, of)],
        headlines=[*headlines(micro, theirs, "micro"), *headlines(fitted, theirs, FITTED), *gains(micro, theirs)],
        sensitivities=sensitivities(micro, theirs),
        lessons=lessons(micro),
        draw=lambda *panels: draw(panels, {"micro": micro, "fitted here": fitted}, theirs),
        panels=(1, 2),
        size=(9.0, 3.8),
    )


def fitted_curves(theirs: Curves) -> Curves:
    """Polynomials as in PolynomialCost, fitted to the report's own latencies."""
    constant, linear, quadratic = fit_prefill([(n, 0, y) for n, y in theirs["prefill", "latency"]])
    step, request, token = fit_step([(b, b * CONTEXT, y) for b, y in theirs["decode", "latency"]])
    return curves(
        [(n, constant + n * (linear + 0.5 * quadratic * n)) for n, _ in theirs["prefill", "latency"]],
        [(b, step + b * (request + CONTEXT * token)) for b, _ in theirs["decode", "latency"]],
    )


def off_by(ours: Points, theirs: Points) -> float:
    """The largest relative error where one is scaled to meet the other best: of the shape, whatever the unit. That of
    throughput is the same.
    """
    ratios = [y / expected for (_, y), (_, expected) in zip(ours, theirs, strict=True)]
    return (max(ratios) - min(ratios)) / (max(ratios) + min(ratios))


def as_drawn(ours: Points, theirs: Points) -> float:
    """The largest relative error where each is scaled by its own largest."""
    return max(abs(y / expected - 1) for (_, y), (_, expected) in zip(ours, theirs, strict=True))


def headlines(ours: Curves, theirs: Curves, name: str) -> list[Headline]:
    """The cost of one more request in `micro`'s batch is of this figure."""
    found = []
    for phase in PHASES:
        kind = "fitted" if name == FITTED or phase == "decode" else "predicted"
        error = off_by(ours[phase, "latency"], theirs[phase, "latency"])
        found.append(Headline(SHAPE[phase], 0.0, error, at_most(WORST), name, "none", kind, NOTES[phase]))
    return found


def gains(ours: Curves, theirs: Curves) -> list[Headline]:
    common = {"profile": "micro", "trace": "none"}
    names = {
        "prefill": ("prefill throughput, 128k over 8k", "predicted"),
        "decode": ("decode throughput, 16 requests over 1", "fitted"),
    }
    return [
        Headline(name, *(gain(of[phase, "throughput"]) for of in (theirs, ours)), untargeted(), kind=kind, **common)
        for phase, (name, kind) in names.items()
    ]


def gain(points: Points) -> float:
    return points[-1][1] / points[0][1]


def sensitivities(micro: Curves, theirs: Curves) -> list[Sensitivity]:
    """What is compared, and how much more attention, the quadratic term, would have to cost."""
    _, linear, quadratic = MICRO.prefill_coefficients
    factors, expected = (0.9, 1.0, 1.1, 1.2, 1.3), theirs["prefill", "latency"]
    errors = [off_by([(n, n * (linear + 0.5 * f * quadratic * n)) for n, _ in expected], expected) for f in factors]
    found = [Sensitivity("cost of attention over that in `micro`", factors, SHAPE["prefill"], errors)]
    for phase in PHASES:
        drawn = [of(micro[phase, "latency"], theirs[phase, "latency"]) for of in (off_by, as_drawn)]
        found.append(Sensitivity("curves are scaled", ("to meet best", "by their largest"), SHAPE[phase], drawn))
    return found


def lessons(ours: Curves) -> list[str]:
    return [
        f"Sixteen requests decode {gain(ours['decode', 'throughput']):.1f} times as many tokens a second as one, while "
        f"a prompt of 128k tokens is prefilled at {gain(ours['prefill', 'throughput']):.0%} of the rate of one of 8k: "
        "decoding wants large batches, prefill gains nothing by them."
    ]


def rows_of(source: str, found: Curves) -> list[dict]:
    names = {"prefill": "prompt_tokens", "decode": "batch"}
    return [
        {"source": source, "phase": phase, "measure": measure, names[phase]: x, "over_largest": y}
        for (phase, measure), points in found.items()
        for x, y in points
    ]


def draw(panels, ours: dict[str, Curves], theirs: Curves, x_unit: dict[str, float] | None = None) -> None:
    """x_unit: what an x is divided by, as where lengths differ."""
    labels = {"prefill": "prompt length, tokens", "decode": f"requests that decode, {CONTEXT // K}k tokens each"}
    for axes, phase in zip(panels, PHASES, strict=True):
        for place, measure in enumerate(MEASURES):
            for shift, (name, of) in enumerate(ours.items()):
                line(axes, of[phase, measure], f"{measure}, {name}", place + 2 * shift, markers=False)
            line(axes, theirs[phase, measure], f"{measure}, report", place, paper=True)
        axes.set(title=phase, xlabel=labels[phase], ylabel="over the largest", ylim=(0, 1.05))
        axes.legend()


def measured() -> int:
    from machine_engine import MachineEngine  # it brings JAX, which nothing else here wants

    parts = (8, 1) if FLAGS.quick else range(16, 0, -1)
    lengths = [FLAGS.longest // 16 * (17 - part) for part in parts]
    batches = [1, FLAGS.max_batch] if FLAGS.quick else list(range(1, FLAGS.max_batch + 1))
    contexts = {"longest": lengths[-1], "context": FLAGS.context}
    engine = MachineEngine(FLAGS.model, FLAGS.model_dir, contexts)
    prefills = engine.prefills((tokens, 0) for tokens in lengths)
    steps = engine.steps((batch, FLAGS.context) for batch in batches)
    ours = curves([*zip(lengths, prefills, strict=True)], [*zip(batches, steps, strict=True)])
    theirs, machine = paper(), f"this machine, {FLAGS.model}"
    names = {
        "prefill": f"prefill throughput, {lengths[-1]} tokens over {lengths[0]} (report: 128k over 8k)",
        "decode": f"decode throughput, {batches[-1]} requests over 1",
    }
    headlines = [
        Headline(
            name,
            *(gain(of[phase, "throughput"]) for of in (theirs, ours)),
            untargeted(),
            machine,
            "none",
            "predicted",
            "a small model on CPUs: short chunks do not fill it, and all parameters are read again for each step",
        )
        for phase, name in names.items()
    ]
    return publish(
        FLAGS,
        claim=CLAIM,
        rows=[row for name, of in ((machine, ours), ("paper", theirs)) for row in rows_of(name, of)],
        headlines=headlines,
        lessons=[
            f"Here {batches[-1]} requests decode {gain(ours['decode', 'throughput']):.1f} times as many tokens a "
            "second as one: CPUs run out of arithmetic much sooner than the paper's GPUs."
        ],
        draw=lambda *panels: draw_measured(panels, ours, theirs),
        panels=(1, 2),
        size=(9.0, 3.8),
    )


def draw_measured(panels, ours: Curves, theirs: Curves) -> None:
    """Over the longest and the largest, since machines and models differ."""
    labels = {"prefill": "prompt length / the longest", "decode": "requests that decode / the most"}
    for axes, phase in zip(panels, PHASES, strict=True):
        for place, measure in enumerate(MEASURES):
            for is_paper, of in ((False, ours), (True, theirs)):
                points = of[phase, measure]
                shares = [(x / points[-1][0], y) for x, y in points]
                line(axes, shares, f"{measure}, {'report' if is_paper else 'measured'}", place, paper=is_paper)
        axes.set(title=phase, xlabel=labels[phase], ylabel="over the largest", ylim=(0, 1.05))
        axes.legend()


if __name__ == "__main__":
    run_script(main)
