"""Chunked pipeline parallelism over two processes, each on one core, against one; and against the ways that the report
compares it with, tensor and sequence parallelism over the same two (section 5.1).

    python benchmarks/pipeline.py [--model=smollm2-135m] [--lengths=200,4096,8192] [--json=FILE]

The ideal is what a perfect pipeline makes of the chunks' times on one stage (schedule.makespan). Bytes are those that
crossed the loopback, headers included: let nothing else use it. Whatever the figures are, the exit code is 0.
"""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from absl import flags
from command import parse, run
from table import Row, at_least, at_most, print_heads, print_row, row, write_json

from mooncake_jax.errors import UsageError
from mooncake_jax.model.catalog import DEFAULT_MODEL_DIR, resolve
from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.model.sources import open_source
from mooncake_jax.parallel.mesh import MeshShape
from mooncake_jax.parallel.processes import free_address
from mooncake_jax.parallel.schedule import bubbles, makespan, ticks

FLAGS = flags.FlagValues()
flags.DEFINE_string("model", "smollm2-135m", "a model's name or path", flag_values=FLAGS)
flags.DEFINE_string("model_dir", str(DEFAULT_MODEL_DIR), "folder that models are kept in", flag_values=FLAGS)
flags.DEFINE_list("lengths", ["200", "4096", "8192"], "tokens of the prompts", flag_values=FLAGS)
flags.DEFINE_integer("prefill_chunk", 512, "most tokens of a chunk", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_integer("repeats", 3, "runs of which the median counts", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_string("json", None, "write the rows to this file too", flag_values=FLAGS)

STAGES = 2
SHORT = 512  # tokens, below which two stages need only be no slower than one
DEADLINE_S = 900
WORKER = Path(__file__).with_name("pipeline_worker.py")


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    config = open_source(resolve(FLAGS.model, Path(FLAGS.model_dir))).config()
    context = config.max_context
    if not all(length.isdecimal() and 0 < int(length) <= context for length in FLAGS.lengths):
        raise UsageError(
            f"--lengths={','.join(FLAGS.lengths)}: name numbers of tokens from 1 to the model's context of {context}, "
            "with commas between"
        )
    one = measure("cpp", 1)
    ways = {way: measure(way, STAGES) for way in ways_of(config)}
    rows = [row for length in FLAGS.lengths for row in rows_of(length, one[length], ways)]
    print_heads()
    for one_row in rows:
        print_row(one_row)
    if FLAGS.json:
        write_json(Path(FLAGS.json), rows)
    return 0


def ways_of(config: LlamaConfig) -> list[str]:
    """Those that the model can be cut for; says why of the one that it cannot."""
    try:
        MeshShape(1, STAGES).check(config)
    except UsageError as error:
        print(f"tensor parallelism over {STAGES} is left out: {error}", file=sys.stderr)
        return ["cpp", "sp"]
    return ["cpp", "tp", "sp"]


def measure(way: str, processes: int) -> dict[str, dict]:
    """By length: seconds, bytes, and for one process the seconds of each chunk."""
    coordinator = free_address("localhost")
    begin = [sys.executable, str(WORKER), FLAGS.model, FLAGS.model_dir, way]
    end = [str(processes), coordinator, str(FLAGS.prefill_chunk), str(FLAGS.repeats), *FLAGS.lengths]
    running = [
        subprocess.Popen(
            [*begin, str(process), *end],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=partial(os.sched_setaffinity, 0, {process}),  # XLA counts the cores that it may use
        )
        for process in range(processes)
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE_S) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (_, error) in zip(running, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"{way} over {processes} processes failed: {error[-2000:]}")
    print(f"{way} over {processes}: done", file=sys.stderr, flush=True)
    return json.loads(outputs[-1][0].splitlines()[-1])


def rows_of(length: str, one: dict, ways: dict[str, dict[str, dict]]) -> list[Row]:
    chunks, cpp = one["chunks"], ways["cpp"][length]
    rows = []
    if int(length) <= SHORT:
        name = f"prompt {length}, two stages' time of one's"
        rows.append(row(name, cpp["seconds"], "s", one["seconds"], at_most(1.1)))
    else:
        ideal = sum(chunks) / makespan([[seconds / STAGES] * STAGES for seconds in chunks])
        speedup = sum(chunks) / cpp["seconds"]
        rows.append(row(f"prompt {length}, speed-up of two stages, of the ideal", speedup, "x", ideal, at_least(0.92)))
        idle, places = bubbles(ticks(chunks, STAGES))
        rows.append(row(f"prompt {length}, {len(chunks)} chunks: ticks", places // STAGES, "ticks"))
        rows.append(row(f"prompt {length}, places without work", 100 * idle / places, "%"))
        for place in (0, len(chunks) - 1):
            rows.append(row(f"prompt {length}, chunk {place} on one stage", chunks[place], "s"))
    for way, figures in ways.items():
        seconds, sent = figures[length]["seconds"], figures[length]["bytes"]
        rows.append(row(f"prompt {length}, {way}: TTFT of one process's", seconds, "s", one["seconds"]))
        rows.append(row(f"prompt {length}, {way}: sent", sent / 1e6, "MB", ways["cpp"][length]["bytes"] / 1e6))
    return rows


if __name__ == "__main__":
    run(main)
