"""mooncake-jax replay: serve prompts or a trace on a real cluster of MPI ranks.

Outside MPI it checks its input and starts its own ranks; under mpiexec it is one of them. Rank 0 reads the workload,
makes the other ranks instances, runs Conductor, and writes the results.
"""

import dataclasses
import importlib
import itertools
import math
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import mpi4py
from absl import flags

from mooncake_jax.cache.slots import slot_bytes
from mooncake_jax.cache.ssd_folder import check_folder
from mooncake_jax.cluster.config import ClusterConfig
from mooncake_jax.cluster.frontend import ServingLimits, tokenise, with_block_keys, within_context
from mooncake_jax.cluster.launch import RanksDied, launched, run_ranks, under_mpi
from mooncake_jax.cluster.results import check_writable
from mooncake_jax.commands.believed_cost import believed_cost
from mooncake_jax.commands.cost_use import check_used
from mooncake_jax.commands.mfu_flags import check_mfu_flags, define_mfu_flags
from mooncake_jax.commands.plan import Plan
from mooncake_jax.commands.scheduling_flags import (
    check_above_zero,
    check_at_least,
    check_out,
    check_scheduling_flags,
    define_scheduling_flags,
    instances_and_stages,
)
from mooncake_jax.errors import UsageError
from mooncake_jax.model.catalog import DEFAULT_MODEL_DIR, resolve
from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.model.sources import inspect_model, model_fingerprint
from mooncake_jax.model.tokenizer import Tokenizer
from mooncake_jax.request import Request
from mooncake_jax.sched.making import make_role_policy, make_scheduler
from mooncake_jax.sched.profiles import PROFILES
from mooncake_jax.workload.prompts import builtin_prompts, read_prompts
from mooncake_jax.workload.trace import read_sourced, trace_requests

FLAGS = flags.FlagValues()
MPI_START_DEADLINE_S = 60
LEAST_GBPS, MOST_GBPS = 0.01, 10_000  # slower, and the measurements at the start would take minutes
MOST_RANKS_HERE = 256  # more on one machine are a slip of the pen
TRACE_FLAGS = ("limit", "length_scale", "time_scale")
COUNTS = ("decode", "tp", "prefill_chunk", "block_size", "dram_mib", "ssd_mib", "max_batch")
LEAST_KV_TOKENS = 16  # fewer serve nobody, and a decoding instance tries its steps on a few
WORKLOAD_FLAGS = ("prompts", "trace", *TRACE_FLAGS, "interval_s", "seed")


def _define() -> None:
    kwargs = {"flag_values": FLAGS}
    _define_workload(kwargs)
    _define_cluster(kwargs)
    _define_memory(kwargs)
    define_scheduling_flags(FLAGS)
    flags.DEFINE_string(
        "cost",
        None,
        f"what Conductor believes: a file of profile's, or {', '.join(PROFILES)} (default: measured)",
        **kwargs,
    )
    define_mfu_flags(FLAGS, "device (default: measured)")
    flags.DEFINE_float("request_timeout", 600.0, "seconds after its arrival at which a request fails", **kwargs)
    flags.DEFINE_string("out", None, "folder for the results (default: results/<time>)", **kwargs)
    flags.DEFINE_integer("seed", 0, "seed of trace tokens, of sampling and of --policy=random", **kwargs)


def _define_workload(kwargs: dict[str, Any]) -> None:
    flags.DEFINE_string("prompts", None, "JSONL file of prompts to serve (default: a built-in set)", **kwargs)
    flags.DEFINE_string(
        "trace", None, "Mooncake trace (JSONL) to serve; its tokens are made from its hash ids", **kwargs
    )
    flags.DEFINE_integer("limit", None, "serve only the first requests of the trace", **kwargs)
    flags.DEFINE_integer("length_scale", 1, "divide the trace's lengths and its 512-token blocks by this", **kwargs)
    flags.DEFINE_float("time_scale", 1.0, "replay the trace so many times as fast", **kwargs)
    flags.DEFINE_float("interval_s", 1.0, "seconds between prompts that name no arrival_s", **kwargs)


def _define_cluster(kwargs: dict[str, Any]) -> None:
    flags.DEFINE_string(
        "model", "smollm2-135m", "a name of the catalogue, a .gguf file, or a folder in HF layout", **kwargs
    )
    flags.DEFINE_string("model_dir", str(DEFAULT_MODEL_DIR), "folder that models are kept in", **kwargs)
    flags.DEFINE_enum(
        "dtype",
        "float32",
        ["float32", "bfloat16", "auto"],
        "type of weights and KVCache; auto: whichever a short measurement on rank 0 finds faster",
        **kwargs,
    )
    flags.DEFINE_string(
        "prefill", "2", "prefill instances; 2x4: two instances of four pipeline stages, each stage a rank", **kwargs
    )
    flags.DEFINE_integer("tp", 1, "devices of each stage, which share every layer by tensor parallelism", **kwargs)
    flags.DEFINE_integer("decode", 1, "decoding instances", **kwargs)
    flags.DEFINE_integer("prefill_chunk", 512, "most tokens that a prefill computes at once", **kwargs)
    flags.DEFINE_integer("max_batch", 16, "most requests that an instance decodes at once", **kwargs)
    flags.DEFINE_float(
        "link_gbps", None, "model slow links: what an instance's rank sends passes at this rate, in Gbps", **kwargs
    )
    flags.DEFINE_enum(
        "transport",
        "auto",
        ["auto", "host", "gpudirect"],
        "how KVCache leaves a prefill instance's devices: gpudirect hands device memory to MPI, which must know CUDA; "
        "auto: where that works, else through host memory",
        **kwargs,
    )


def _define_memory(kwargs: dict[str, Any]) -> None:
    flags.DEFINE_integer("block_size", 16, "tokens of a KVCache block", **kwargs)
    flags.DEFINE_integer("dram_mib", 1024, "MiB of DRAM that each prefill rank lends to the KVCache pool", **kwargs)
    flags.DEFINE_string(
        "ssd_dir", None, "folder on this host's SSD for a second tier of the KVCache pool (default: none)", **kwargs
    )
    flags.DEFINE_integer("ssd_mib", 16384, "MiB that each prefill rank may take in --ssd_dir", **kwargs)
    flags.DEFINE_integer(
        "device_kv_tokens", 16384, "tokens of KVCache in a decoding instance's device memory", **kwargs
    )


_define()


def main(arguments: list[str]) -> int:
    unknown = FLAGS(["replay", *arguments])[1:]
    if unknown:
        raise UsageError(f"{unknown[0]!r} is no flag: flags are written --name=value")
    if under_mpi():
        mpi4py.rc.finalize = False  # ranks leave MPI under a deadline of their own
        # MPICH's UCX warns of windows that are not freed, which would take all ranks, those that are dead too.
        os.environ.setdefault("UCX_LOG_LEVEL", "error")
        signal.alarm(MPI_START_DEADLINE_S)  # MPI_Init waits for ever for a rank that died before it
        run_rank = importlib.import_module("mooncake_jax.commands.replay_rank").run_rank  # importing it starts MPI
        return run_rank(make_plan)
    plan = make_plan()
    ranks = len(plan.config.nodes)
    print(
        f"starting {ranks} ranks, which load {FLAGS.model}: Conductor, {', '.join(plan.config.nodes[1:])}", flush=True
    )
    try:
        return run_ranks(ranks, ["replay", *arguments, f"--out={plan.out}"])
    except RanksDied as error:
        kept = f"; what had ended by then is in {plan.out}" if plan.out.exists() else ""
        print(f"mooncake-jax replay: {error}{kept}", file=sys.stderr)
        return 1


def make_plan(ranks: int | None = None) -> Plan:
    """Check the flags, against the number of ranks if there are any yet, and read the workload. Creates nothing.

    Raises UsageError.
    """
    _check_flags()
    out = Path(FLAGS.out) if FLAGS.out else Path("results") / time.strftime("%Y%m%d-%H%M%S")
    check_writable(out)
    config, measured = _config(), None
    make_scheduler(config)  # before anything is loaded: a policy may not be there
    make_role_policy(config)
    _check_ranks(config, ranks)
    if ranks is None and config.ssd_dir is not None:  # all ranks will be here; elsewhere each looks for itself
        for node in itertools.chain.from_iterable(map(config.stage_nodes, config.prefill_nodes)):
            check_folder(Path(config.ssd_dir) / node)
    if config.dtype == "auto":
        config, measured = _choose_dtype(config, ranks is not None)
    path = resolve(FLAGS.model, Path(FLAGS.model_dir))
    model, tokenizer = inspect_model(path)
    config.mesh_shape.check(model, pp_flag=f"--prefill={FLAGS.prefill}")
    _check_memory(config, model)
    fingerprint = model_fingerprint(path, config.dtype)
    cost = believed_cost(config, model, fingerprint)
    requests = _requests(model, tokenizer)
    if not requests:
        raise UsageError("the workload holds no request")
    requests = within_context(requests, model.max_context)
    if cost is not None:
        token = config.block_layout(model).bytes_per_token
        check_used(cost, f"--cost={config.cost}", config, token, requests, model.max_context)
    limits = ServingLimits(model.max_context, model.vocab_size, config.decoding_pages * config.block_size)
    keyed = with_block_keys(requests, fingerprint, config.block_size, limits)
    workload = {name: FLAGS[name].value for name in WORKLOAD_FLAGS}
    return Plan(config, measured, cost, model, fingerprint, tokenizer, keyed, limits, out, workload)


def _check_flags() -> None:
    if FLAGS.prompts is not None and FLAGS.trace is not None:
        raise UsageError(f"--prompts={FLAGS.prompts} and --trace={FLAGS.trace} exclude one another: give one of them")
    for name in TRACE_FLAGS:
        if FLAGS[name].present and FLAGS.trace is None:
            raise UsageError(f"--{name}={FLAGS[name].value} says how to replay a trace: give --trace=FILE too")
    if FLAGS["interval_s"].present and FLAGS.trace is not None:
        raise UsageError(f"--interval_s={FLAGS.interval_s} is for prompts, a trace has its own times: use --time_scale")
    check_at_least(FLAGS, 1, *COUNTS)
    check_at_least(FLAGS, LEAST_KV_TOKENS, "device_kv_tokens")
    check_above_zero(FLAGS, "request_timeout", unit=" seconds")
    check_scheduling_flags(FLAGS)
    if FLAGS.elastic_roles and FLAGS.tp > 1:
        raise UsageError(f"--tp={FLAGS.tp}: with --elastic_roles an instance decodes too, on one device: use --tp=1")
    check_mfu_flags(FLAGS)
    check_out(FLAGS)
    if FLAGS.cost is not None and FLAGS.dtype == "auto":
        raise UsageError(f"--cost={FLAGS.cost} was measured in one type: name that instead of --dtype=auto")
    if FLAGS.ssd_dir == "":
        raise UsageError("--ssd_dir= is empty; name a folder, or leave it out for no SSD tier")
    if FLAGS["ssd_mib"].present and not FLAGS.ssd_dir:
        raise UsageError(f"--ssd_mib={FLAGS.ssd_mib} is for the SSD tier: give --ssd_dir=FOLDER too")
    if FLAGS.link_gbps is not None and not LEAST_GBPS <= FLAGS.link_gbps <= MOST_GBPS:
        raise UsageError(
            f"--link_gbps={FLAGS.link_gbps}: use {LEAST_GBPS} to {MOST_GBPS}, or leave it out for no limit"
        )
    if math.isinf(FLAGS.request_timeout):
        raise UsageError("--request_timeout=inf: every request needs a deadline; name a number of seconds")


def _config() -> ClusterConfig:
    prefill, stages = instances_and_stages(FLAGS.prefill)
    flags = {field.name: FLAGS[field.name].value for field in dataclasses.fields(ClusterConfig) if field.name in FLAGS}
    return ClusterConfig(**flags | {"prefill": prefill, "stages": stages})


def _choose_dtype(config: ClusterConfig, measure: bool) -> tuple[ClusterConfig, str | None]:
    """With the faster dtype, and what was measured; without measuring, the one that takes the most memory."""
    if not measure:
        return dataclasses.replace(config, dtype="float32"), None
    choice = importlib.import_module("mooncake_jax.parallel.dtype").choose_dtype()  # imports JAX, else needless here
    return dataclasses.replace(config, dtype=choice.dtype), str(choice)


def _check_ranks(config: ClusterConfig, ranks: int | None) -> None:
    needed = 1 + config.prefill * config.stages + config.decode
    if ranks is None and needed > MOST_RANKS_HERE:
        raise UsageError(
            f"--prefill={FLAGS.prefill} and --decode={FLAGS.decode} need {needed} ranks; this machine starts at most "
            f"{MOST_RANKS_HERE}: lower them, or start them on several with mpiexec"
        )
    if ranks not in (None, needed):
        raise UsageError(
            f"mpiexec started {ranks} ranks, but Conductor, --prefill={FLAGS.prefill} and --decode={config.decode} "
            f"need {needed}: start {needed}, or change the flags"
        )


def _check_memory(config: ClusterConfig, model: LlamaConfig) -> None:
    block = max(slot_bytes(layout) for layout in config.stage_layouts(model))
    if block > config.dram_mib << 20:
        raise UsageError(
            f"--dram_mib={config.dram_mib} does not hold one block of --block_size={config.block_size} tokens "
            f"({block / 2**20:.1f} MiB): raise the first or lower the second"
        )
    if config.prefill_chunk > model.max_context:
        raise UsageError(
            f"--prefill_chunk={config.prefill_chunk} is above the model's context of {model.max_context}: lower it"
        )
    if config.max_batch > config.decoding_pages:
        raise UsageError(
            f"--max_batch={config.max_batch} requests need a page each, and "
            f"--device_kv_tokens={config.device_kv_tokens} makes {config.decoding_pages} of "
            f"--block_size={config.block_size}: lower the first or raise the second"
        )


def _requests(model: LlamaConfig, tokenizer: Tokenizer | None) -> list[Request]:
    if FLAGS.trace is None:
        prompts = (
            read_prompts(FLAGS.prompts, FLAGS.interval_s)
            if FLAGS.prompts is not None
            else builtin_prompts(FLAGS.interval_s)
        )
        return tokenise(prompts, tokenizer, FLAGS.seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows, source = read_sourced(FLAGS.trace, FLAGS.limit)
        requests = trace_requests(
            rows,
            vocab_size=model.vocab_size,
            seed=FLAGS.seed,
            length_scale=FLAGS.length_scale,
            time_scale=FLAGS.time_scale,
            block_size=FLAGS.block_size,
        )
    if source is not None and not launched():
        print(f"mooncake-jax replay: {FLAGS.trace}: {source}", file=sys.stderr)
    for warning in caught if not launched() else ():
        print(f"mooncake-jax replay: warning: {warning.message}", file=sys.stderr)
    return requests
