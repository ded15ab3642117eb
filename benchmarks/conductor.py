"""What one decision of Conductor costs: KVCache-centric scheduling and its SLO check on a real trace (report 6.1).

    python benchmarks/conductor.py --trace=FILE [--requests=N] [--instances=16,1000] [--json=FILE]

Each row is for so many prefill and as many decoding instances, with 3 M tokens of KVCache in each prefill instance's
DRAM (FAST25 5.3). The trace arrives as much faster as there are more instances, so that their load is the same: that
of the trace on 8; then again four times as fast, so that queues are long and some are rejected. Between decisions
prefills begin and end, blocks land and are evicted, and outputs end, as the cost model says, so that the pool fills as
in the trace; only the decisions are timed, each under its time limit, as in a cluster. The match, which is the pool's
part, and the time limit are rows of their own. Whatever the figures are, the exit code is 0.
"""

import heapq
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from absl import flags
from command import parse, run
from table import Row, at_most, print_heads, print_row, row, write_json
from traces import read_told

from mooncake_jax.cache.pool import KVCachePool
from mooncake_jax.cluster.time_limit import decision_time
from mooncake_jax.errors import UsageError
from mooncake_jax.metrics import percentile
from mooncake_jax.request import SLO, Request
from mooncake_jax.sched.admission import SLOCheck
from mooncake_jax.sched.cost import PolynomialCost
from mooncake_jax.sched.decisions import Dispatch
from mooncake_jax.sched.decoding_load import DecodingLoad
from mooncake_jax.sched.kvcache_centric import KVCacheCentric
from mooncake_jax.sched.prefill_queue import PrefillQueue
from mooncake_jax.sched.scheduler import Scheduler, TimeLimit
from mooncake_jax.sched.view import ClusterView, RequestView
from mooncake_jax.workload.trace import TRACE_BLOCK, TraceRow

FLAGS = flags.FlagValues()
flags.DEFINE_string("trace", None, "Mooncake trace (JSONL) to decide on", flag_values=FLAGS)
flags.DEFINE_integer("requests", None, "only the first ones of the trace", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_list("instances", ["16", "1000"], "numbers of prefill and of decoding instances", flag_values=FLAGS)
flags.DEFINE_string("json", None, "write the rows to this file too", flag_values=FLAGS)

TARGETS = {16: at_most(40), 1000: at_most(1000)}  # microseconds
INSTANCES_OF_TRACE = 8
OVERLOAD = 4  # times the load of the trace
BLOCKS = 3_000_000 // TRACE_BLOCK  # of an instance's DRAM
SCALE = 1 / 1024  # of the costs below, LLaMA2-70B on 8 A800 (FAST25 figure 14), in thousands of tokens
COST = PolynomialCost((0.044, 0.1133 * SCALE, 2 * 7.94e-4 * SCALE**2), (0.0227, 0.0035, 3.47e-8), (0.0, 1.14e-11))
BYTES_PER_TOKEN = 327_680
SECONDS_PER_TOKEN = 0.05  # of output


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    instances = _instances()
    if FLAGS.trace is None:
        raise UsageError("--trace is missing: name a Mooncake trace, such as conversation_trace.jsonl")
    trace = read_told(FLAGS.trace, FLAGS.requests)
    rows: list[Row] = []
    print_heads()
    with decision_time() as time_limit:
        for found in itertools.chain.from_iterable(decision_rows(trace, number, time_limit) for number in instances):
            print_row(found)
            rows.append(found)
            if FLAGS.json:
                write_json(Path(FLAGS.json), rows)
    return 0


def _instances() -> list[int]:
    try:
        numbers = [int(text) for text in FLAGS.instances]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UsageError(
            f"--instances={','.join(FLAGS.instances)}: name numbers of at least 1, with commas between them"
        )
    return numbers


def decision_rows(trace: Sequence[TraceRow], instances: int, time_limit: TimeLimit) -> Iterator[Row]:
    name, target = f"{instances} + {instances} instances", TARGETS.get(instances)
    replay = _replayed(trace, instances, 1, time_limit)
    yield row(f"{name}: decision, median", _median(replay.decisions), "us", None, target)
    yield row(f"{name}: decision, P99", _micro(percentile(replay.decisions, 99)), "us")
    yield row(f"{name}: of it the match, median", _median(replay.matches), "us")
    yield row(f"{name}: of it the time limit, median", _median(replay.limits), "us")
    held = sum(dram for dram, _ in replay.view.pool.blocks().values())
    yield row(f"{name}: blocks in the pool at the end", held, "blocks")
    yield row(f"{name}: requests rejected", replay.rejected_percent, "%")
    replay = _replayed(trace, instances, OVERLOAD, time_limit)
    yield row(f"{name}, {OVERLOAD} x load: decision, median", _median(replay.decisions), "us", None, target)
    yield row(f"{name}, {OVERLOAD} x load: decision, P99", _micro(percentile(replay.decisions, 99)), "us")
    yield row(f"{name}, {OVERLOAD} x load: requests rejected", replay.rejected_percent, "%")


def _replayed(trace: Sequence[TraceRow], instances: int, load: float, time_limit: TimeLimit) -> "Replay":
    replay = Replay(instances, time_limit)
    for line in trace:
        replay.arrive(*_request(line, INSTANCES_OF_TRACE / instances / load))
    return replay


def _median(seconds: Sequence[float]) -> float:
    return _micro(statistics.median(seconds))


def _micro(seconds: float) -> float:
    return seconds * 1e6


def _request(line: TraceRow, time_scale: float) -> tuple[Request, int]:
    """With keys of its full blocks; and how many tokens its output has, which no scheduler is told."""
    keys = tuple(key.to_bytes(32, "little") for key in line.hash_ids[: line.input_length // TRACE_BLOCK])
    arrival = line.timestamp / 1000 * time_scale
    return Request(str(line.index), arrival, line.input_length, 0, block_keys=keys), line.output_length


class Replay:
    """A cluster that does in no time what the cost model says, and what its Conductor believes of it."""

    def __init__(self, instances: int, time_limit: TimeLimit):
        prefill = [f"prefill{i}" for i in range(instances)]
        self.view = ClusterView(
            prefill={node: PrefillQueue() for node in prefill},
            decoding={f"decode{i}": DecodingLoad() for i in range(instances)},
            pool=KVCachePool(dict.fromkeys(prefill, BLOCKS)),
            cost=COST,
            slo=SLO(ttft=30.0),
            block_size=TRACE_BLOCK,
            bytes_per_token=BYTES_PER_TOKEN,
        )
        self._time_limit = time_limit
        self._scheduler = Scheduler(KVCacheCentric(), SLOCheck(), time_limit=time_limit)
        self._free = dict.fromkeys(prefill, 0.0)
        self._events: list[tuple] = []  # (when, number, what, its arguments)
        self._numbers = itertools.count()
        self.decisions: list[float] = []  # seconds
        self.matches: list[float] = []
        self.limits: list[float] = []
        self.rejected = 0

    def arrive(self, request: Request, output_tokens: int) -> None:
        now = request.arrival
        while self._events and self._events[0][0] <= now:
            at, _, happen, arguments = heapq.heappop(self._events)
            happen(*arguments, at)
        begun = time.perf_counter()
        decision = self._scheduler.dispatch(request, self.view, now)
        decided = time.perf_counter()
        self.view.pool.match(request.block_keys)
        matched = time.perf_counter()
        with self._time_limit:
            pass
        self.limits.append(time.perf_counter() - matched)
        self.matches.append(matched - decided)
        self.decisions.append(decided - begun)
        if isinstance(decision, Dispatch):
            self._dispatch(request, decision, output_tokens, now)
        else:
            self.rejected += 1

    @property
    def rejected_percent(self) -> float:
        return 100 * self.rejected / len(self.decisions)

    def _dispatch(self, request: Request, decision: Dispatch, output_tokens: int, now: float) -> None:
        view, number, node = self.view, next(self._numbers), decision.prefill
        matched = max(view.pool.match(request.block_keys)[node], decision.replicate_blocks)
        reused = view.reusable_tokens(matched, request.prompt_tokens)
        blocks = view.pool.reserve(node, request.block_keys)
        view.dispatched(number, RequestView.of(request), decision, reused, now)
        start = max(now, self._free[node])
        done = self._free[node] = start + COST.prefill(request.prompt_tokens, reused)
        self._at(start, view.prefill_started, number, node, decision.decoding, request.prompt_tokens, reused)
        self._at(done, self._prefilled, number, decision, blocks)
        self._at(done + output_tokens * SECONDS_PER_TOKEN, self._leave, number, decision.decoding)

    def _prefilled(self, number: int, decision: Dispatch, blocks: tuple, now: float) -> None:
        self.view.prefill_done(number, decision.prefill, decision.decoding, now)
        self.view.pool.land(decision.prefill, blocks)
        self.view.pool.release(decision.prefill, blocks)

    def _leave(self, number: int, decoding: str, now: float) -> None:
        self.view.left(number, decoding)

    def _at(self, when: float, happen, *arguments) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), happen, arguments))


if __name__ == "__main__":
    run(main)
