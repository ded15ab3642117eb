"""mooncake-jax simulate: serve a trace on a cluster in virtual time, an hour of it in seconds.

The actors are those that serve on real ranks; a cost model stands in for engines, memories and links (simulate/).
"""

import gc
import math
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from absl import flags

from mooncake_jax import metrics
from mooncake_jax.cluster.record import Recorded
from mooncake_jax.cluster.results import Results, check_writable
from mooncake_jax.commands.progress import WorkProgress
from mooncake_jax.commands.scheduling_flags import (
    check_above_zero,
    check_at_least,
    define_scheduling_flags,
    instances_and_stages,
)
from mooncake_jax.errors import UsageError
from mooncake_jax.model.architectures import ARCHITECTURES
from mooncake_jax.report import print_results
from mooncake_jax.request import SLO, Outcome, Request
from mooncake_jax.sched.cost_file import resolve_cost
from mooncake_jax.sched.profiles import PROFILES, SCHEDULE_S
from mooncake_jax.simulate.actors import make_actors
from mooncake_jax.simulate.config import PARTS, SimulationConfig
from mooncake_jax.simulate.run import Hosted, Run, Stuck, simulate
from mooncake_jax.simulate.traces import keyed_requests
from mooncake_jax.workload.trace import TRACE_BLOCK, read_trace

FLAGS = flags.FlagValues()
EXIT_FAILED = 1
_DTYPE = "bfloat16"
_EVERY = 100  # requests between two looks of the progress bar


def _define() -> None:
    kwargs = {"flag_values": FLAGS}
    flags.DEFINE_string("trace", None, "Mooncake trace (JSONL) to serve", **kwargs)
    flags.DEFINE_integer("limit", None, "serve only the first requests of the trace", **kwargs)
    flags.DEFINE_float("speed", 1.0, "replay the trace so many times as fast", **kwargs)
    flags.DEFINE_string("prefill", "8", "prefill instances; 2x4: two pipelines of four nodes each", **kwargs)
    flags.DEFINE_integer("decode", 8, "decoding instances, of a node each", **kwargs)
    flags.DEFINE_integer("prefill_chunk", 8192, "most tokens that enter a pipeline of nodes at once", **kwargs)
    flags.DEFINE_string("model", "llama2-70b", f"one of {', '.join(ARCHITECTURES)}", **kwargs)
    flags.DEFINE_string(
        "cost", "micro", f"what a node's hardware takes: {', '.join(PROFILES)}, or a file of profile's", **kwargs
    )
    flags.DEFINE_string("believed_cost", None, "what Conductor believes of it (default: the same)", **kwargs)
    flags.DEFINE_list("without", [], f"parts of the hardware that are left out: some of {', '.join(PARTS)}", **kwargs)
    flags.DEFINE_float("link_gbps", None, "rate of a node's NIC in Gbps (default: as the cost model has it)", **kwargs)
    flags.DEFINE_float("decision_s", SCHEDULE_S, "seconds from an arrival until its prefill instance knows", **kwargs)
    flags.DEFINE_integer("dram_mib", 937_500, "MiB of DRAM that each prefill node lends to the KVCache pool", **kwargs)
    flags.DEFINE_integer("ssd_mib", 0, "MiB of SSD that each prefill node lends to it", **kwargs)
    flags.DEFINE_integer(
        "device_kv_tokens", 1_300_000, "tokens of KVCache in a decoding instance's device memory", **kwargs
    )
    flags.DEFINE_integer("max_batch", 256, "most requests that an instance decodes at once", **kwargs)
    define_scheduling_flags(FLAGS)
    flags.DEFINE_bool("recheck", True, "decoding instances judge TBT again as KVCache arrives", **kwargs)
    flags.DEFINE_float("request_timeout", math.inf, "seconds after its arrival at which a request fails", **kwargs)
    flags.DEFINE_integer("seed", 0, "seed of --policy=random", **kwargs)
    flags.DEFINE_bool("single_steps", False, "an event for each decoding step: slow, for checking", **kwargs)
    flags.DEFINE_bool("check", False, "assert all invariants all along: slow", **kwargs)
    flags.DEFINE_bool("events", False, "write events.jsonl too: what every actor handled, and when", **kwargs)
    flags.DEFINE_string("out", None, "folder for the results (default: results/<time>)", **kwargs)


_define()


def main(arguments: list[str]) -> int:
    unknown = FLAGS(["simulate", *arguments])[1:]
    if unknown:
        raise UsageError(f"{unknown[0]!r} is no flag: flags are written --name=value")
    _check_flags()
    config = make_config()
    out = Path(FLAGS.out) if FLAGS.out else Path("results") / time.strftime("%Y%m%d-%H%M%S")
    check_writable(out)
    cost = resolve_cost(FLAGS.cost, FLAGS.model)
    believed = cost if FLAGS.believed_cost is None else resolve_cost(FLAGS.believed_cost, FLAGS.model)
    make_actors(config, believed)  # before the trace is read: a policy may not be there
    gc.disable()  # a run makes millions of objects, and no cycles of them
    try:
        return _serve(config, cost, believed, out)
    finally:
        gc.enable()


def _serve(config: SimulationConfig, cost: Any, believed: Any, out: Path) -> int:
    requests = keyed_requests(_rows(), FLAGS.speed)
    results = Results(out, events=FLAGS.events, at_once=False)
    try:
        run = _simulate(config, cost, believed, requests, results)
    except Stuck as error:
        print(f"mooncake-jax simulate: {error}; what had ended by then is in {out}", file=sys.stderr)
        return EXIT_FAILED
    finally:
        results.close()
    _report(config, run, requests, results)
    return 0


def _simulate(config: SimulationConfig, cost: Any, believed: Any, requests: list[Request], results: Results) -> Run:
    def host(node, actor):
        return Recorded(node, actor, lambda line: results.add_events([line])) if FLAGS.events else actor

    hosted: Hosted = host
    with WorkProgress("simulating", "simulated") as progress:

        def ended(outcome: Outcome) -> None:
            results.add(outcome)
            if not len(results.outcomes) % _EVERY:
                progress.update(len(results.outcomes), len(requests))

        return simulate(config, cost, requests, believed=believed, ended=ended, host=hosted, check=FLAGS.check)


def _report(config: SimulationConfig, run: Run, requests: list[Request], results: Results) -> None:
    slo = SLO(config.ttft_slo, config.tbt_slo)
    summary = metrics.summarise(run.outcomes, slo, run.duration_s)
    workload = {"trace": FLAGS.trace, "limit": FLAGS.limit, "speed": FLAGS.speed}
    cost = {"model": FLAGS.model, "cost": FLAGS.cost, "believed_cost": FLAGS.believed_cost or FLAGS.cost}
    parts = {"pool": run.pool, "hardware": run.hardware, "workload": workload, **cost}
    results.finish(summary | parts | {"settings": {"config": config.to_json()}})
    order = {request.id: place for place, request in enumerate(requests)}
    print_results(sorted(run.outcomes, key=lambda outcome: order[outcome.id]), summary)
    print(f"results are in {results.out}")


def make_config() -> SimulationConfig:
    """As the flags say. Raises UsageError."""
    prefill, stages = instances_and_stages(FLAGS.prefill)
    model = ARCHITECTURES[FLAGS.model]
    names = set(SimulationConfig.__dataclass_fields__) & set(FLAGS)
    values: dict[str, Any] = {name: FLAGS[name].value for name in names}
    config = SimulationConfig(
        **values
        | {
            "prefill": prefill,
            "stages": stages,
            "bytes_per_token": model.kv_bytes_per_token(_DTYPE),
            "layers": model.num_layers,
            "block_size": TRACE_BLOCK,
            "dram_bytes": FLAGS.dram_mib << 20,
            "ssd_bytes": FLAGS.ssd_mib << 20,
            "link_bytes_per_s": None if FLAGS.link_gbps is None else FLAGS.link_gbps * 1e9 / 8,
            "without": frozenset(FLAGS.without),
        }
    )
    block = config.bytes_per_token * config.block_size // stages
    if config.dram_blocks < 1:
        raise UsageError(f"--dram_mib={FLAGS.dram_mib} does not hold one block, {block / 2**20:.1f} MiB: raise it")
    if config.decoding_pages < 1:
        raise UsageError(f"--device_kv_tokens={FLAGS.device_kv_tokens} is less than a block of {TRACE_BLOCK}: raise it")
    return config


def _check_flags() -> None:
    if not FLAGS.trace:
        raise UsageError("--trace is missing; give --trace=FILE")
    if FLAGS.model not in ARCHITECTURES:
        raise UsageError(
            f"--model={FLAGS.model}: no shape is known by this name; use one of {', '.join(ARCHITECTURES)}"
        )
    check_at_least(FLAGS, 1, "decode", "prefill_chunk", "dram_mib", "device_kv_tokens", "max_batch")
    check_at_least(FLAGS, 0, "ssd_mib", "decision_s", "seed")
    check_above_zero(FLAGS, "ttft_slo", "tbt_slo", "request_timeout", "decoding_time_s", unit=" seconds")
    check_above_zero(FLAGS, "speed", "link_gbps")
    for name in ("speed", "link_gbps"):
        if FLAGS[name].value is not None and math.isinf(FLAGS[name].value):
            raise UsageError(f"--{name}=inf: it must be a finite number")
    for part in FLAGS.without:
        if part not in PARTS:
            raise UsageError(f"--without: there is no part {part!r}; use some of {','.join(PARTS)}")


def _rows():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = read_trace(FLAGS.trace, FLAGS.limit)
    for warning in caught:
        print(f"mooncake-jax simulate: warning: {warning.message}", file=sys.stderr)
    return rows
