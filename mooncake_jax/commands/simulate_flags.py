"""The flags of `mooncake-jax simulate`, and the cluster that they ask for."""

import math
from pathlib import Path
from typing import Any

from absl import flags

from mooncake_jax.commands.mfu_flags import check_mfu_flags, define_mfu_flags
from mooncake_jax.commands.scheduling_flags import (
    as_written,
    check_above_zero,
    check_at_least,
    check_instances,
    check_out,
    check_scheduling_flags,
    check_speed,
    define_scheduling_flags,
    instances_and_stages,
)
from mooncake_jax.commands.simulate_memory import check_memory
from mooncake_jax.errors import UsageError
from mooncake_jax.model.architectures import ARCHITECTURES
from mooncake_jax.sched.cost_file import read_cost_file
from mooncake_jax.sched.coupled import COUPLED_MODES
from mooncake_jax.sched.profiles import PROFILES, SCHEDULE_S
from mooncake_jax.simulate.config import PARTS, PREFIX_SENDERS, SimulationConfig, config_of
from mooncake_jax.workload.trace import TRACE_BLOCK

FLAGS = flags.FlagValues()
_MOST_DECISION_S = 3600.0
# Flags that say nothing of coupled instances, and that say something of nothing else.
_SEPARATE = (
    "prefill",
    "decode",
    "eviction",
    "prefill_chunk",
    "dram_mib",
    "ssd_mib",
    "link_gbps",
    "receive_gbps",
    "inline_prefill",
    "batched_prefill",
    "prefix_senders",
    "kvcache_balancing_threshold",
    "prefill_mfu_floor",
    "peak_tflops",
    "without",
    "recheck",
    "rematch",
)
_NODES_APART = ("batched_prefill", "prefix_senders", "receive_gbps")
_OF_NETWORK = ("receive_gbps", "prefix_senders")
_COUPLED = ("coupled_mode", "token_budget")


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
        "prompt tokens in an iteration of a coupled instance (default: as its mode has it), or in a batch of "
        "--batched_prefill (default: no limit)",
        **kwargs,
    )
    flags.DEFINE_integer("drop_over", None, "reject prompts of more tokens, as vLLM does over 131072", **kwargs)
    flags.DEFINE_integer("prefill_chunk", 8192, "most tokens that enter a pipeline of nodes at once", **kwargs)
    _define_hardware(kwargs)
    define_scheduling_flags(FLAGS)
    define_mfu_flags(FLAGS, "node (default: of the accelerators that --cost is of, if it says)")
    flags.DEFINE_bool(
        "batched_prefill",
        False,
        "a prefill instance takes on all that wait at once, and all are done when the last one is",
        **kwargs,
    )
    flags.DEFINE_enum(
        "prefix_senders",
        PREFIX_SENDERS[0],
        list(PREFIX_SENDERS),
        "who sends the KVCache of a reused prefix to the decoding instance: the prefill instance, or any node",
        **kwargs,
    )
    flags.DEFINE_bool("recheck", True, "decoding instances judge TBT again as KVCache arrives", **kwargs)
    flags.DEFINE_bool("rematch", True, "prefill instances match the prefix again as a prefill starts", **kwargs)
    flags.DEFINE_float(
        "cores",
        None,
        "instances share one machine of so many cores; implies --single_steps (default: each has its own hardware)",
        **kwargs,
    )
    flags.DEFINE_float("request_timeout", math.inf, "seconds after its arrival at which a request fails", **kwargs)
    flags.DEFINE_integer("seed", 0, "seed of --policy=random and --prefix_senders=any", **kwargs)
    flags.DEFINE_bool("single_steps", False, "an event for each decoding step: slow, for checking", **kwargs)
    flags.DEFINE_bool("check", False, "assert all invariants all along: slow", **kwargs)
    flags.DEFINE_bool("events", False, "write events.jsonl too: what every actor handled, and when", **kwargs)
    flags.DEFINE_string("out", None, "folder for the results (default: results/<time>)", **kwargs)


def _define_hardware(kwargs: dict[str, Any]) -> None:
    """Of the nodes."""
    flags.DEFINE_string("model", "llama2-70b", f"one of {', '.join(ARCHITECTURES)}", **kwargs)
    flags.DEFINE_string(
        "cost", "micro", f"what a node's hardware takes: {', '.join(PROFILES)}, or a file of profile's", **kwargs
    )
    flags.DEFINE_string("believed_cost", None, "what Conductor believes of it (default: the same)", **kwargs)
    flags.DEFINE_list("without", [], f"parts of the hardware that are left out: some of {', '.join(PARTS)}", **kwargs)
    flags.DEFINE_float("link_gbps", None, "rate of a node's NIC in Gbps (default: as the cost model has it)", **kwargs)
    flags.DEFINE_float("receive_gbps", None, "what a NIC receives, in Gbps (default: as much as it sends)", **kwargs)
    flags.DEFINE_float("decision_s", SCHEDULE_S, "seconds from an arrival until its prefill instance knows", **kwargs)
    flags.DEFINE_integer("dram_mib", 937_500, "MiB of DRAM that each prefill node lends to the KVCache pool", **kwargs)
    flags.DEFINE_integer("ssd_mib", 0, "MiB of SSD that each prefill node lends to it", **kwargs)
    flags.DEFINE_integer(
        "device_kv_tokens", 1_300_000, "tokens of KVCache in a decoding instance's device memory", **kwargs
    )
    flags.DEFINE_integer("max_batch", 256, "most requests that an instance decodes at once", **kwargs)


_define()


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
        del values["policy"]
    config = config_of(
        FLAGS.model,
        **values
        | {
            "prefill": prefill,
            "stages": stages,
            "block_size": TRACE_BLOCK,
            "dram_bytes": FLAGS.dram_mib << 20,
            "ssd_bytes": FLAGS.ssd_mib << 20,
            "link_bytes_per_s": _bytes_per_s(FLAGS.link_gbps),
            "receive_bytes_per_s": _bytes_per_s(FLAGS.receive_gbps),
            "without": frozenset(FLAGS.without),
        }
        | _busy_cores(stages),
    )
    if config.batched_prefill and stages > 1:
        raise UsageError(
            f"--prefill={FLAGS.prefill}: a pipeline takes on one prompt after another; leave out --batched_prefill, or "
            "use instances of one stage"
        )
    check_memory(FLAGS, config)
    return config


def _bytes_per_s(gbps: float | None) -> float | None:
    return None if gbps is None else gbps * 1e9 / 8


def _busy_cores(stages: int) -> dict[str, float]:
    """What each computation keeps busy, if cores are shared. Raises UsageError."""
    if FLAGS.cores is None:
        return {}
    if stages > 1 or FLAGS.coupled:
        raise UsageError(f"--cores={FLAGS.cores:g} is for prefill instances of one stage and decoding instances only")
    for name in _NODES_APART:
        if FLAGS[name].present:
            raise UsageError(
                f"--{name}={FLAGS[name].value}: with --cores nodes are not modelled one by one; leave it out"
            )
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
    check_instances(FLAGS, 1, "decode")
    check_at_least(FLAGS, 1, "prefill_chunk", "dram_mib", "device_kv_tokens", "max_batch")
    _check_coupled()
    check_at_least(FLAGS, 0, "ssd_mib", "seed")
    if not 0 <= FLAGS.decision_s <= _MOST_DECISION_S:
        raise UsageError(f"--decision_s={FLAGS.decision_s}: use 0 to {_MOST_DECISION_S:g} seconds")
    check_above_zero(FLAGS, "request_timeout", unit=" seconds")
    check_scheduling_flags(FLAGS)
    check_mfu_flags(FLAGS)
    check_above_zero(FLAGS, "speed", "link_gbps", "receive_gbps", "cores")
    check_speed(FLAGS.speed, "--speed=")
    check_out(FLAGS)
    for name in ("link_gbps", "receive_gbps", "cores"):
        if FLAGS[name].value is not None and math.isinf(FLAGS[name].value):
            raise UsageError(f"--{name}=inf: it must be a finite number")
    for part in FLAGS.without:
        if part not in PARTS:
            raise UsageError(f"--without: there is no part {part!r}; use some of {','.join(PARTS)}")
    for name in _OF_NETWORK:
        if FLAGS[name].present and "network" in FLAGS.without:
            raise UsageError(f"{as_written(FLAGS, name)}: --without=network leaves it nothing to do; leave out either")


def _check_coupled() -> None:
    check_instances(FLAGS, 0, "coupled")
    check_at_least(FLAGS, 1, *(name for name in ("token_budget", "drop_over") if FLAGS[name].value is not None))
    pointless, why = (
        (_SEPARATE, f"--coupled={FLAGS.coupled} instances have no such part")
        if FLAGS.coupled
        else (_COUPLED, "it is for --coupled=N")
    )
    for name in pointless:
        if name == "token_budget" and FLAGS.batched_prefill:
            continue
        if FLAGS[name].present:
            raise UsageError(f"{as_written(FLAGS, name)}: {why}; leave it out")
