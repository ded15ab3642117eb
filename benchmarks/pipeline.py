"""Chunked pipeline parallelism over two processes, each on one core, against one; and against the ways that the report
compares it with, tensor and sequence parallelism over the same two (section 5.1).

    python benchmarks/pipeline.py [--model=smollm2-135m] [--lengths=200,4096,8192] [--links_length=4096] [--json=FILE]

The ideal is what a perfect pipeline makes of the chunks' times on one stage (schedule.makespan). What the ways send,
and what a slow link makes of their TTFT, is measured on a model that all of them can cut, between two hosts made of
network namespaces (hosts.py). Where those are not permitted, bytes are counted on the loopback, which nothing else
should use then, and times are modelled: what the loopback took, and the bytes of one direction over the link's rate.
Whatever the figures are, the exit code is 0.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path

from absl import flags
from command import parse, run
from hosts import Hosts, why_not
from table import Row, at_least, at_most, print_heads, print_row, row, write_json

from mooncake_jax.errors import UsageError
from mooncake_jax.model.catalog import DEFAULT_MODEL_DIR, resolve
from mooncake_jax.model.sources import open_source
from mooncake_jax.parallel.mesh import MeshShape
from mooncake_jax.parallel.processes import free_address
from mooncake_jax.parallel.schedule import bubbles, makespan, ticks

HERE = Path(__file__).parent
FLAGS = flags.FlagValues()
flags.DEFINE_string("model", "smollm2-135m", "a model's name or path", flag_values=FLAGS)
flags.DEFINE_string(
    "links_model",
    f"dummy:{HERE / 'four_kv_heads'}",
    "the model that is cut in all ways (SmolLM2's size, with a number of KV heads that two can share)",
    flag_values=FLAGS,
)
flags.DEFINE_string("model_dir", str(DEFAULT_MODEL_DIR), "folder that models are kept in", flag_values=FLAGS)
flags.DEFINE_list("lengths", ["200", "4096", "8192"], "tokens of the prompts", flag_values=FLAGS)
flags.DEFINE_integer("links_length", 4096, "tokens of the prompt that is cut in all ways", flag_values=FLAGS)
flags.DEFINE_integer("prefill_chunk", 512, "most tokens of a chunk", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_integer("repeats", 3, "runs of which the median counts", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_string("json", None, "write the rows to this file too", flag_values=FLAGS)

STAGES = 2
WAYS = ("cpp", "tp", "sp")
LINKS_GBPS = (10, 1)
SHORT = 512  # tokens, below which two stages need only be no slower than one
DEADLINE_S = 900
FREE_PORT = 4321  # nothing else listens on hosts of our own
WORKER = HERE / "pipeline_worker.py"


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    check_lengths("lengths", FLAGS.model, FLAGS.lengths)
    check_lengths("links_length", FLAGS.links_model, [str(FLAGS.links_length)])
    MeshShape(1, STAGES).check(open_source(locate(FLAGS.links_model)).config())
    rows: list[Row] = []
    print_heads()
    for one_row in chain(speed_rows(), links_rows()):
        rows.append(one_row)
        print_row(one_row)
    if FLAGS.json:
        write_json(Path(FLAGS.json), rows)
    return 0


def locate(model: str):
    return resolve(model, Path(FLAGS.model_dir))


def check_lengths(flag: str, model: str, lengths: Sequence[str]) -> None:
    context = open_source(locate(model)).config().max_context
    if not all(length.isdecimal() and 0 < int(length) <= context for length in lengths):
        raise UsageError(
            f"--{flag}={','.join(lengths)}: name numbers of tokens from 1 to the model's context of {context}, "
            "with commas between"
        )


def measure(
    model: str, way: str, processes: int, lengths: Sequence[str], hosts: Hosts | None = None
) -> dict[str, dict]:
    """By length: seconds, bytes sent by all, and for one process the seconds of each chunk."""
    print(f"{model}: {way} over {processes}", file=sys.stderr, flush=True)
    coordinator = free_address("localhost") if hosts is None else f"{hosts.names[0]}:{FREE_PORT}"
    running = []
    for process in range(processes):
        command = [sys.executable, str(WORKER), model, FLAGS.model_dir, way, str(process), str(processes), coordinator]
        command += [str(FLAGS.prefill_chunk), str(FLAGS.repeats), "lo" if hosts is None else "cable", *lengths]
        running.append(
            subprocess.Popen(
                command if hosts is None else hosts.command(hosts.names[process], command),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=partial(os.sched_setaffinity, 0, {process}),  # XLA counts the cores that it may use
            )
        )
    try:
        outputs = [process.communicate(timeout=DEADLINE_S) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (_, error) in zip(running, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"{way} over {processes} processes failed: {error[-2000:]}")
    figures = [json.loads(output.splitlines()[-1]) for output, _ in outputs]
    if hosts is not None:  # each has counted what it has sent itself; on the loopback all count all
        for length in lengths:
            figures[-1][length]["bytes"] = sum(one[length]["bytes"] for one in figures)
    return figures[-1]


def speed_rows() -> Iterator[Row]:
    """Two stages against one, over the loopback."""
    one, two = (measure(FLAGS.model, "cpp", processes, FLAGS.lengths) for processes in (1, STAGES))
    for length in FLAGS.lengths:
        chunks, seconds = one[length]["chunks"], two[length]["seconds"]
        if int(length) <= SHORT:
            name = f"prompt {length}, two stages' time of one's"
            yield row(name, seconds, "s", one[length]["seconds"], at_most(1.1))
            continue
        ideal = sum(chunks) / makespan([[cost / STAGES] * STAGES for cost in chunks])
        name = f"prompt {length}, speed-up of two stages, of the ideal"
        yield row(name, sum(chunks) / seconds, "x", ideal, at_least(0.92))
        yield row(f"prompt {length}, TTFT of one stage's", seconds, "s", one[length]["seconds"])
        idle, places = bubbles(ticks(chunks, STAGES))
        yield row(f"prompt {length}, {len(chunks)} chunks: ticks", places // STAGES, "ticks")
        yield row(f"prompt {length}, places without work", 100 * idle / places, "%")
        for place, cost in enumerate(chunks):
            yield row(f"prompt {length}, chunk {place} on one stage", cost, "s")


def links_rows() -> Iterator[Row]:
    """What each way sends, and its TTFT on links of several rates, against one process's."""
    length, reason = str(FLAGS.links_length), why_not()
    one = measure(FLAGS.links_model, "cpp", 1, [length])[length]["seconds"]
    with ExitStack() as stack:
        hosts = None if reason is not None else stack.enter_context(Hosts())
        if hosts is None:
            print(f"{reason}: times on slow links are modelled", file=sys.stderr)
        found = {way: measure(FLAGS.links_model, way, STAGES, [length], hosts)[length] for way in WAYS}
        for way, figures in found.items():
            sent, least = figures["bytes"] / 1e6, found["cpp"]["bytes"] / 1e6
            yield row(f"{length} tokens, {way}: sent, of cpp's", sent, "MB", least)
        for way, figures in found.items():
            yield row(f"{length} tokens, {way}: TTFT of one process's", figures["seconds"], "s", one)
        for gbps in LINKS_GBPS:
            if hosts is not None:
                hosts.limit(gbps)
            for way, figures in found.items():
                if hosts is not None:
                    seconds, how = measure(FLAGS.links_model, way, STAGES, [length], hosts)[length]["seconds"], ""
                else:
                    # A pipeline sends one way only, the others as much in either direction.
                    one_way = figures["bytes"] / (1 if way == "cpp" else 2)
                    seconds, how = figures["seconds"] + one_way / (gbps * 1e9 / 8), ", modelled"
                yield row(f"{length} tokens, {way} at {gbps} Gbps: TTFT of one process's{how}", seconds, "s", one)


if __name__ == "__main__":
    run(main)
