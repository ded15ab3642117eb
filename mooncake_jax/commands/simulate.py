"""mooncake-jax simulate: serve a trace on a cluster in virtual time, an hour of it in seconds.

The actors are those that serve on real ranks; a cost model stands in for engines, memories and links (simulate/).
"""

import gc
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from absl import flags

from mooncake_jax import metrics
from mooncake_jax.cluster.record import Recorded, protocol
from mooncake_jax.cluster.results import Results, check_writable
from mooncake_jax.cluster.time_limit import decision_time
from mooncake_jax.commands.cost_use import check_used
from mooncake_jax.commands.mfu_flags import check_mfu_flags, define_mfu_flags, node_peak_flops, simulated_mfu
from mooncake_jax.commands.progress import WorkProgress
from mooncake_jax.commands.reading import read_rows
from mooncake_jax.commands.scheduling_flags import (
    check_above_zero,
    check_at_least,
    check_scheduling_flags,
    check_speed,
    define_scheduling_flags,
    instances_and_stages,
)
from mooncake_jax.commands.simulate_memory import check_memory
from mooncake_jax.errors import UsageError
from mooncake_jax.model.architectures import ARCHITECTURES
from mooncake_jax.report import print_results
from mooncake_jax.request import FAILED, SLO, Outcome, Request
from mooncake_jax.sched.cost import CostModel
from mooncake_jax.sched.cost_file import read_cost_file, resolve_cost
from mooncake_jax.sched.coupled import COUPLED_MODES
from mooncake_jax.sched.plugins import DEFAULT_COUPLED_POLICY
from mooncake_jax.sched.profiles import PROFILES, SCHEDULE_S
from mooncake_jax.sched.serve import Actor
from mooncake_jax.simulate.actors import make_actors
from mooncake_jax.simulate.config import PARTS, SimulationConfig
from mooncake_jax.simulate.run import Hosted, Run, Stuck, simulate, why_invalid
from mooncake_jax.simulate.settings import SimulatedSettings
from mooncake_jax.simulate.traces import arrival_rate, keyed_requests
from mooncake_jax.workload.trace import TRACE_BLOCK

FLAGS = flags.FlagValues()
EXIT_FAILED = 1
_DTYPE = "bfloat16"
# Flags that say nothing of coupled instances, and that say something of nothing else.
_SEPARATE = (
    "prefill",
    "decode",
    "prefill_chunk",
    "dram_mib",
    "ssd_mib",
    "link_gbps",
    "inline_prefill",
    "kvcache_balancing_threshold",
    "prefill_mfu_floor",
    "peak_tflops",
    "without",
    "recheck",
)
_COUPLED = ("coupled_mode", "token_budget")
_EVERY = 100  # requests between two looks of the progress bar


def _define() -> None:
    kwargs = {"flag_values": FLAGS}
    flags.DEFINE_string("trace", None, "Mooncake trace (JSONL) to serve", **kwargs)
    flags.DEFINE_integer("limit", None, "serve only the first requests of the trace", **kwargs)
    flags.DEFINE_float("speed", 1.0, "replay the trace so many times as fast, 0.001 to 1000", **kwargs)
    flags.DEFINE_string("prefill", "8", "prefill instances; 2x4: two pipelines of four nodes each", **kwargs)
    flags.DEFINE_integer("decode", 8, "decoding instances, of a node each", **kwargs)
    flags.DEFINE_integer("coupled", 0, "instances that do both, instead of --prefill and --decode", **kwargs)
    flags.DEFINE_enum("coupled_mode", "plain", list(COUPLED_MODES), "how these prefill (docs/simulation.md)", **kwargs)
    flags.DEFINE_integer(
        "token_budget",
        None,
        "prompt tokens in an iteration of a coupled instance (default: as its mode has it)",
        **kwargs,
    )
    flags.DEFINE_integer("drop_over", None, "reject prompts of more tokens, as vLLM does over 131072", **kwargs)
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
    define_mfu_flags(FLAGS, "node (default: of the accelerators that --cost is of, if it says)")
    flags.DEFINE_bool("recheck", True, "decoding instances judge TBT again as KVCache arrives", **kwargs)
    flags.DEFINE_float(
        "cores",
        None,
        "instances share one machine of so many cores; implies --single_steps (default: each has its own hardware)",
        **kwargs,
    )
    flags.DEFINE_float("request_timeout", math.inf, "seconds after its arrival at which a request fails", **kwargs)
    flags.DEFINE_integer("seed", 0, "seed of --policy=random", **kwargs)
    flags.DEFINE_bool("single_steps", False, "an event for each decoding step: slow, for checking", **kwargs)
    flags.DEFINE_bool("check", False, "assert all invariants all along: slow", **kwargs)
    flags.DEFINE_bool("events", False, "write events.jsonl too: what every actor handled, and when", **kwargs)
    flags.DEFINE_string("out", None, "folder for the results (default: results/<time>)", **kwargs)


_define()


@dataclass(frozen=True, slots=True)
class Simulation:
    """What the flags ask for. believed: what Conductor believes of the hardware's cost; source: what the trace says of
    itself, if anything.
    """

    config: SimulationConfig
    cost: CostModel
    believed: CostModel
    requests: list[Request]
    source: str | None


def main(arguments: list[str]) -> int:
    config = parse(arguments)
    out = Path(FLAGS.out) if FLAGS.out else Path("results") / time.strftime("%Y%m%d-%H%M%S")
    check_writable(out)
    simulation = prepare(config)
    results = Results(out, events=FLAGS.events, at_once=False)
    try:
        run = _run_shown(simulation, results)
    except Stuck as error:
        print(f"mooncake-jax simulate: {error}; what had ended by then is in {out}", file=sys.stderr)
        return EXIT_FAILED
    finally:
        results.close()
    summary = summarise(simulation, run)
    results.finish(summary)
    order = {request.id: place for place, request in enumerate(simulation.requests)}
    print_results(sorted(run.outcomes, key=lambda outcome: order[outcome.id]), summary)
    print(f"results are in {results.out}")
    return EXIT_FAILED if summary["requests"][FAILED] else 0


def parse(arguments: list[str]) -> SimulationConfig:
    """Check these flags, and only these: what an earlier call gave is forgotten. Raises UsageError or flags.Error."""
    FLAGS.unparse_flags()
    for name in FLAGS:
        FLAGS[name].unparse()
    unknown = FLAGS(["simulate", *arguments])[1:]
    if unknown:
        raise UsageError(f"{unknown[0]!r} is no flag: flags are written --name=value")
    _check_flags()
    return make_config()


def prepare(config: SimulationConfig) -> Simulation:
    """With the costs and the trace that the flags name. Raises UsageError."""
    cost, believed = check_loadable(config)
    rows, source = read_rows(FLAGS.trace, "simulate", FLAGS.limit)
    requests = keyed_requests(rows, FLAGS.speed, FLAGS.trace)
    _check_costs(config, {"cost": cost} | ({"believed_cost": believed} if FLAGS.believed_cost else {}), requests)
    return Simulation(config, cost, believed, requests, source)


def _check_costs(config: SimulationConfig, costs: Mapping[str, CostModel], requests: Sequence[Request]) -> None:
    """By their flags. Raises UsageError for one that predicts negative times for what this run may do."""
    served = [request for request in requests if why_invalid(request, config) is None]
    longest = max((request.prompt_tokens for request in served), default=1)
    for name, cost in costs.items():
        check_used(cost, f"--{name}={FLAGS[name].value}", config, config.bytes_per_token, served, longest)


def check_loadable(config: SimulationConfig) -> tuple[CostModel, CostModel]:
    """Both costs that the flags name. Raises UsageError where one, the policy or the admission cannot be loaded, and
    for a bound on MFU without a peak.
    """
    cost = resolve_cost(FLAGS.cost, FLAGS.model)
    believed = cost if FLAGS.believed_cost is None else resolve_cost(FLAGS.believed_cost, FLAGS.model)
    make_actors(config, believed)
    node_peak_flops(FLAGS, cost)
    return cost, believed


def run_simulation(
    simulation: Simulation,
    ended: Callable[[Outcome], None] = lambda outcome: None,
    host: Hosted = lambda node, actor: actor,
) -> Run:
    """As simulate.run.simulate. Raises Stuck."""
    config, cost, requests = simulation.config, simulation.cost, simulation.requests
    gc.disable()  # a run makes millions of objects, and no cycles of them
    try:
        with decision_time() as time_limit:
            options = {"believed": simulation.believed, "check": FLAGS.check, "time_limit": time_limit}
            return simulate(config, cost, requests, ended=ended, host=host, **options)
    finally:
        gc.enable()


def _run_shown(simulation: Simulation, results: Results) -> Run:
    """With progress; what ends is written."""

    def host(node: str, actor: Actor) -> Actor:
        return Recorded(node, actor, lambda line: results.add_events([line])) if FLAGS.events else actor

    with WorkProgress("simulating", "simulated") as progress:

        def ended(outcome: Outcome) -> None:
            results.add(outcome)
            if not len(results.outcomes) % _EVERY:
                progress.update(len(results.outcomes), len(simulation.requests))

        return run_simulation(simulation, ended, host)


def summarise(simulation: Simulation, run: Run) -> dict[str, Any]:
    """As summary.json has it."""
    config, requests = simulation.config, simulation.requests
    summary = metrics.summarise(run.outcomes, SLO(config.ttft_slo, config.tbt_slo), run.duration_s)
    workload = {"trace": FLAGS.trace, "source": simulation.source, "limit": FLAGS.limit, "speed": FLAGS.speed}
    workload |= {"requests_per_s": arrival_rate(requests)}
    cost = {"model": FLAGS.model, "cost": FLAGS.cost, "believed_cost": FLAGS.believed_cost or FLAGS.cost}
    parts = {
        "pool": run.pool,
        "prefill_mfu": _prefill_mfu(simulation, run),
        "roles": run.roles,
        "inlined_prefills": run.inlined_prefills,
        "faults": run.faults,
        "hardware": run.hardware,
    }
    parts |= {"workload": workload, **cost}
    settings = SimulatedSettings(config, cost["model"], cost["believed_cost"])
    return summary | parts | {"settings": settings.to_json() | {"protocol": protocol()}}


def _prefill_mfu(simulation: Simulation, run: Run) -> dict[str, Any] | None:
    """None where there is no prefill pool, or no peak is known."""
    peak = node_peak_flops(FLAGS, simulation.cost)
    if peak is None or simulation.config.coupled:
        return None
    model, peak = ARCHITECTURES[FLAGS.model], peak * simulation.config.stages
    return simulated_mfu(run.prefill_work, model, peak, run.duration_s, FLAGS.prefill_mfu_floor)


def make_config() -> SimulationConfig:
    """As the flags say. Raises UsageError."""
    prefill, stages = instances_and_stages(FLAGS.prefill)
    model = ARCHITECTURES[FLAGS.model]
    if stages > model.num_layers:
        raise UsageError(
            f"--prefill={FLAGS.prefill}: {stages} stages cannot share the {model.num_layers} layers of {FLAGS.model}; "
            f"use {model.num_layers} at most"
        )
    names = set(SimulationConfig.__dataclass_fields__) & set(FLAGS)
    values: dict[str, Any] = {name: FLAGS[name].value for name in names}
    if FLAGS.coupled and not FLAGS["policy"].present:
        values["policy"] = DEFAULT_COUPLED_POLICY
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
        | _busy_cores(stages)
    )
    check_memory(FLAGS, config)
    return config


def _busy_cores(stages: int) -> dict[str, float]:
    """What each computation keeps busy, if cores are shared. Raises UsageError."""
    if FLAGS.cores is None:
        return {}
    if stages > 1 or FLAGS.coupled:
        raise UsageError(f"--cores={FLAGS.cores:g} is for prefill instances of one stage and decoding instances only")
    if FLAGS.without:
        raise UsageError(
            f"--without={','.join(FLAGS.without)}: with --cores all is as it was measured, of which no part can be "
            "left out; leave out either"
        )
    if FLAGS.cost in PROFILES:
        raise UsageError(f"--cores={FLAGS.cores:g} needs --cost=FILE of `mooncake-jax profile`, not {FLAGS.cost}")
    busy = read_cost_file(Path(FLAGS.cost), FLAGS.model).busy_cores
    if busy is None:
        raise UsageError(f"--cost={FLAGS.cost} has no busy_cores, which --cores needs: measure it again on CPUs")
    return dict(zip(("prefill_cores", "step_cores"), busy, strict=True))


def _check_flags() -> None:
    if not FLAGS.trace:
        raise UsageError("--trace is missing; give --trace=FILE")
    if FLAGS.model not in ARCHITECTURES:
        raise UsageError(
            f"--model={FLAGS.model}: no shape is known by this name; use one of {', '.join(ARCHITECTURES)}"
        )
    check_at_least(FLAGS, 1, "decode", "prefill_chunk", "dram_mib", "device_kv_tokens", "max_batch")
    _check_coupled()
    check_at_least(FLAGS, 0, "ssd_mib", "decision_s", "seed")
    check_above_zero(FLAGS, "request_timeout", unit=" seconds")
    check_scheduling_flags(FLAGS)
    check_mfu_flags(FLAGS)
    check_above_zero(FLAGS, "speed", "link_gbps", "cores")
    check_speed(FLAGS.speed, "--speed=")
    for name in ("link_gbps", "cores"):
        if FLAGS[name].value is not None and math.isinf(FLAGS[name].value):
            raise UsageError(f"--{name}=inf: it must be a finite number")
    for part in FLAGS.without:
        if part not in PARTS:
            raise UsageError(f"--without: there is no part {part!r}; use some of {','.join(PARTS)}")


def _check_coupled() -> None:
    check_at_least(FLAGS, 0, "coupled")
    check_at_least(FLAGS, 1, *(name for name in ("token_budget", "drop_over") if FLAGS[name].value is not None))
    pointless, why = (
        (_SEPARATE, f"--coupled={FLAGS.coupled} instances have no such part")
        if FLAGS.coupled
        else (_COUPLED, "it is for --coupled=N")
    )
    for name in pointless:
        if FLAGS[name].present:
            raise UsageError(f"--{name}={FLAGS[name].value}: {why}; leave it out")
