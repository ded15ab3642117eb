"""What an hour of traffic costs in virtual time: `mooncake-jax simulate` on a whole trace.

    python benchmarks/simulator.py --trace=FILE [--limit=N] [--repeats=3] [--json=FILE]

Each run is the command itself in a process of its own: reading the trace, simulating 8 prefill and 8 decoding instances
with KVCache-centric scheduling, early rejection on prediction, an SSD tier, layer-wise overlap and shared links, and
writing rows and summary. CPU time counts from when all is imported. References are
the first run's. Whatever the figures are, the exit code is 0.
"""

import contextlib
import io
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from absl import flags
from command import parse, run
from table import Row, at_most, print_heads, print_row, row, write_json
from traces import read_told

from mooncake_jax.commands import simulate
from mooncake_jax.errors import UsageError

FLAGS = flags.FlagValues()
flags.DEFINE_string("trace", None, "Mooncake trace (JSONL) to simulate", flag_values=FLAGS)
flags.DEFINE_integer("limit", None, "only the first requests of the trace", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_integer("repeats", 3, "runs of which the median counts", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_string("json", None, "write the rows to this file too", flag_values=FLAGS)

MOST_S, MOST_MIB = 2.0, 250  # of the whole conversation trace, 12,031 requests
CLUSTER = ("--cost=fast25", "--admission=early-predicted", "--ttft_slo=30", "--tbt_slo=0.1", "--ssd_mib=3750000")
SCALES = {  # what differs from the first
    "8P+8D": (),
    "8P+8D at 2x": ("--speed=2",),
    "8P+8D at 4x": ("--speed=4",),
    "8P+8D at 8x": ("--speed=8",),
    "32P+32D": ("--prefill=32", "--decode=32"),
    "32P+32D at 4x": ("--prefill=32", "--decode=32", "--speed=4"),
}


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    if FLAGS.trace is None:
        raise UsageError("--trace is missing: name a Mooncake trace, such as conversation_trace.jsonl")
    requests = len(read_told(FLAGS.trace, FLAGS.limit))
    rows: list[Row] = []
    print_heads()
    for found in simulator_rows(FLAGS.trace, requests, FLAGS.repeats):
        print_row(found)
        rows.append(found)
        if FLAGS.json:
            write_json(Path(FLAGS.json), rows)
    return 0


def simulator_rows(trace: str, requests: int, repeats: int) -> Iterator[Row]:
    first = None
    for name, flags_of in SCALES.items():
        seconds, mib = _measured([f"--trace={trace}", f"--limit={requests}", *CLUSTER, *flags_of], repeats)
        if first is None:
            first = seconds
            yield row(f"{name}: CPU time", seconds, "s", None, at_most(MOST_S))
            yield row(f"{name}: peak memory", mib, "MiB", None, at_most(MOST_MIB))
            yield row(f"{name}: requests a second", requests / seconds, "1/s")
        else:
            yield row(f"{name}: CPU time", seconds, "s", first)
    half, _ = _measured([f"--trace={trace}", f"--limit={max(requests // 2, 1)}", *CLUSTER], repeats)
    yield row("8P+8D, half of the requests: CPU time", half, "s", first)


def _measured(arguments: Sequence[str], repeats: int) -> tuple[float, float]:
    """Median CPU seconds and the most MiB, each run in a fresh process."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as processes:
        runs = [processes.submit(run_command, tuple(arguments)).result() for _ in range(repeats)]
    return statistics.median(seconds for seconds, _ in runs), max(mib for _, mib in runs)


def run_command(arguments: tuple[str, ...]) -> tuple[float, float]:
    """CPU seconds of one simulation, and MiB of the process at its largest."""
    with tempfile.TemporaryDirectory(prefix="mooncake-simulate-") as folder:
        begun = time.process_time()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            simulate.main([*arguments, f"--out={folder}/run"])
        seconds = time.process_time() - begun
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    run(main)
