"""A simulated cluster against the real one: the same requests, the same actors, this machine's measured costs.

    python experiments/sim_vs_real.py [--requests=100] [--load=0.6] [--cost=cost.json] [--out=FOLDER]

Measures this machine with `mooncake-jax profile` (or takes --cost), makes a Poisson workload of so much load, serves it
on a real cluster of ranks (`replay`) and on a simulated one that shares this machine's cores (`simulate --cores`), and
compares TTFT, TBT and throughput. Writes sim_vs_real.json and, where matplotlib is installed (extra `plots`), the
distributions of both in sim_vs_real.png. Leave the machine alone meanwhile: others' work slows the real run only.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

from absl import flags
from other_work import OtherWork
from script import make_folder, parse, run_script

from mooncake_jax.commands.plots import NO_PICTURE, can_plot, pyplot
from mooncake_jax.errors import UsageError
from mooncake_jax.metrics import mean, percentile
from mooncake_jax.sched.cost import CostModel
from mooncake_jax.sched.cost_file import read_cost_file
from mooncake_jax.workload.trace import TRACE_BLOCK

DEADLINE_S = 3600
SHORTEST, LONGEST = 64, 1500  # tokens of a prompt, evenly spread over their logarithm
OUTPUTS = (16, 64)
DOCUMENTS, SHARE_READING = 4, 0.4  # so many prompts begin with one of so many documents
CLUSTER = {"prefill": 2, "decode": 1, "device_kv_tokens": 16384, "max_batch": 8, "dram_mib": 1024}
# Of each figure: how near the simulation is to come (part of the real one's).
TOLERANCE = {"mean TTFT": 0.2, "P90 TTFT": 0.2, "mean TBT": 0.2, "tokens/s": 0.1}

# Those that this process may use: in a container, or under taskset, fewer than the machine has.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

FLAGS = flags.FlagValues()
flags.DEFINE_string("model", "smollm2-135m", "a model's name", flag_values=FLAGS)
flags.DEFINE_string("cost", None, "cost file of this machine (default: measure it first)", flag_values=FLAGS)
flags.DEFINE_integer("requests", 100, "how many", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_float("load", 0.6, "share of the time that requests, one by one, would take", flag_values=FLAGS)
flags.DEFINE_integer("cores", CORES, "of this machine, for the simulation", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_integer("seed", 0, "of the workload", flag_values=FLAGS)
flags.DEFINE_string("out", "results/sim_vs_real", "folder for the results", flag_values=FLAGS)


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    if not 0 < FLAGS.load < 1:
        raise UsageError(f"--load={FLAGS.load}: it must be above 0 and below 1, or queues grow for ever")
    out = make_folder(FLAGS.out)
    others = OtherWork()
    try:
        cost = Path(FLAGS.cost) if FLAGS.cost is not None else measure(out / "cost.json")
        trace = write_trace(out / "trace.jsonl", read_cost_file(cost, FLAGS.model).cost)
        real, busy = serve("replay", trace, out / "real", cost), others.cores()
        runs = {"real": real, "simulated": simulate(trace, out, cost)}
    except subprocess.SubprocessError as error:  # it has told why
        print(f"experiments/sim_vs_real.py: {error}", file=sys.stderr)
        return 1
    figures = {name: summarise(outcomes) for name, outcomes in runs.items()}
    (out / "sim_vs_real.json").write_text(json.dumps(figures, indent=1) + "\n")
    agree = print_table(figures)
    if busy is not None:
        print(f"others kept {busy:.2f} of this machine's {CORES} cores busy while it was measured")
    print(f"results are in {out}{draw(runs, out / 'sim_vs_real.png')}")
    return 0 if agree else 1


def measure(file: Path) -> Path:
    wanted = {"model": FLAGS.model, "max_batch": CLUSTER["max_batch"], "block_size": TRACE_BLOCK, "out": file}
    run("profile", wanted)
    return file


def write_trace(file: Path, cost: CostModel) -> Path:
    """A Mooncake trace of Poisson arrivals, at such a rate that the requests, one by one, would take --load of the
    time.
    """
    draw, rows, ids = random.Random(FLAGS.seed), [], iter(range(DOCUMENTS * LONGEST, sys.maxsize))
    for _ in range(FLAGS.requests):
        tokens = round(SHORTEST * (LONGEST / SHORTEST) ** draw.random())
        blocks = -(-tokens // TRACE_BLOCK)
        document = draw.randrange(DOCUMENTS) if draw.random() < SHARE_READING else None
        known = range(document * LONGEST, document * LONGEST + blocks - 1) if document is not None else ()
        hash_ids = [*known, *(next(ids) for _ in range(blocks - len(known)))]
        rows.append({"input_length": tokens, "output_length": draw.randint(*OUTPUTS), "hash_ids": hash_ids})
    rate = FLAGS.load / mean([seconds_alone(row, cost) for row in rows])
    arrival = 0.0
    with file.open("w") as lines:
        for row in rows:
            lines.write(json.dumps({"timestamp": round(1000 * arrival), **row}) + "\n")
            arrival += draw.expovariate(rate)
    print(f"{FLAGS.requests} requests within {arrival:.0f} s, {rate:.2f} a second")
    return file


def seconds_alone(row: dict, cost: CostModel) -> float:
    """Nothing reused and nobody else in the batch."""
    tokens, outputs = row["input_length"], row["output_length"]
    return cost.prefill(tokens, 0) + (outputs - 1) * cost.step(1, tokens + outputs // 2)


def serve(command: str, trace: Path, out: Path, cost: Path, **more: object) -> list[dict]:
    """Outcomes of a run of the trace, which must all be completed."""
    run(command, {"model": FLAGS.model, "trace": trace, "out": out, "cost": cost, **CLUSTER, **more})
    outcomes = [json.loads(line) for line in (out / "requests.jsonl").open()]
    ended = [outcome for outcome in outcomes if outcome["status"] != "completed"]
    if ended:
        raise UsageError(f"{out}: {len(ended)} requests were not completed, the first since {ended[0]['reason']}")
    return outcomes


def simulate(trace: Path, out: Path, cost: Path) -> list[dict]:
    return serve("simulate", trace, out / "simulated", cost, cores=FLAGS.cores, decision_s=0)


def run(command: str, values: dict[str, object]) -> None:
    arguments = [f"--{name}={value}" for name, value in values.items()]
    if command == "replay":
        arguments.append(f"--block_size={TRACE_BLOCK}")
    print(f"mooncake-jax {command} ...", flush=True)
    whole = [sys.executable, "-m", "mooncake_jax", command, *arguments]
    subprocess.run(whole, check=True, timeout=DEADLINE_S, stdout=subprocess.DEVNULL)


def summarise(outcomes: list[dict]) -> dict[str, float]:
    """Seconds, and tokens of prompts and outputs a second."""
    ttfts = [outcome["ttft_s"] for outcome in outcomes]
    tokens = sum(outcome["prompt_tokens"] + outcome["output_tokens"] for outcome in outcomes)
    first = min(outcome["arrival_s"] for outcome in outcomes)
    return {
        "mean TTFT": mean(ttfts),
        "P90 TTFT": percentile(ttfts, 90),
        "mean TBT": mean([outcome["tbt_mean_s"] for outcome in outcomes]),
        "tokens/s": tokens / (max(map(ended_at, outcomes)) - first),
    }


def ended_at(outcome: dict) -> float:
    return outcome["arrival_s"] + outcome["ttft_s"] + (outcome["output_tokens"] - 1) * outcome["tbt_mean_s"]


def print_table(figures: dict[str, dict[str, float]]) -> bool:
    """Whether all agree."""
    print(f"{'':12}{'real':>10}{'simulated':>11}{'off by':>9}{'at most':>9}")
    agree = True
    for name, most in TOLERANCE.items():
        real, simulated = figures["real"][name], figures["simulated"][name]
        off = simulated / real - 1
        agree = agree and abs(off) <= most
        verdict = "" if abs(off) <= most else "  NO"
        print(f"{name:12}{real:10.4g}{simulated:11.4g}{off:9.1%}{most:9.0%}{verdict}")
    return agree


def draw(runs: dict[str, list[dict]], file: Path) -> str:
    """How TTFT and TBT are distributed in both; says where the picture is, or why not."""
    if not can_plot():
        return NO_PICTURE
    plot = pyplot()
    figure, axes = plot.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
    for panel, (field, name) in zip(axes, (("ttft_s", "TTFT, s"), ("tbt_mean_s", "mean TBT, s")), strict=True):
        for run_name, outcomes in runs.items():
            values = sorted(outcome[field] for outcome in outcomes)
            shares = [(place + 1) / len(values) for place in range(len(values))]
            panel.step(values, shares, where="post", label=run_name)
        panel.set(xlabel=name, ylabel="share of requests", xscale="log")
        panel.legend()
    figure.savefig(file, dpi=150)
    plot.close(figure)
    return f", both distributions in {file.name}"


if __name__ == "__main__":
    run_script(main)
