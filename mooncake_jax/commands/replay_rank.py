"""What one MPI rank does in `mooncake-jax replay`: rank 0 runs Conductor and reports, the others become instances."""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from mpi4py import MPI

from mooncake_jax import metrics
from mooncake_jax.cache.pool import TIERS, Cause, KVCachePool
from mooncake_jax.cluster.actors import ActorSettings
from mooncake_jax.cluster.conductor_rank import ConductorRank, Interruption, SetupError, fit_cost
from mooncake_jax.cluster.control import Ready
from mooncake_jax.cluster.frontend import answers, stop_ids
from mooncake_jax.cluster.instance import InstanceRank
from mooncake_jax.cluster.launch import leave_exit_code
from mooncake_jax.cluster.rank import Rank
from mooncake_jax.cluster.results import Results
from mooncake_jax.cluster.ssd_contents import SSDContents, put_together
from mooncake_jax.cluster.time_limit import decision_time
from mooncake_jax.commands.plan import Plan
from mooncake_jax.errors import UsageError
from mooncake_jax.report import Progress, print_results
from mooncake_jax.request import FAILED, SLO
from mooncake_jax.sched.conductor import Conductor
from mooncake_jax.sched.mfu import prefill_mfu

LEAVE_DEADLINE_S = 5
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def run_rank(make_plan: Callable[[int], Plan]) -> NoReturn:
    """Called under an alarm, which ends once all ranks have met."""
    comm = MPI.COMM_WORLD
    quiet = False  # whether nothing of this rank is under way in MPI
    try:
        rank: Rank = ConductorRank(comm) if comm.Get_rank() == 0 else InstanceRank(comm)
        signal.alarm(0)
        code = _conduct(rank, make_plan) if isinstance(rank, ConductorRank) else rank.run()
        quiet = rank.messenger.close()
    except Exception as error:
        _complain(f"rank {comm.Get_rank()}: {type(error).__name__}: {error}")
        code = EXIT_FAILED
    if comm.Get_rank() == 0:
        leave_exit_code(code)
    _leave(code, quiet)


def _leave(code: int, quiet: bool) -> NoReturn:
    """End MPI in good order, by force after a deadline: a dead peer or a thread that still computes must not keep the
    rank.
    """
    sys.stdout.flush()
    # Not a thread's timer: MPI_Finalize may wait for a dead peer without letting other threads run.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LEAVE_DEADLINE_S)
    if not quiet:  # MPI may not be finalised under a thread that still calls it, nor with sends that nobody takes
        os._exit(code)
    MPI.Finalize()
    if "Open MPI" in MPI.Get_library_version():
        os._exit(code)
    sys.exit(code)  # MPICH takes its last leave in exit handlers


def _conduct(rank: ConductorRank, make_plan: Callable[[int], Plan]) -> int:
    os.environ.setdefault(
        "TTY_COMPATIBLE", "0"
    )  # under mpiexec even a terminal is mpiexec's own; the launcher knows better
    results = None
    try:
        plan = make_plan(rank.messenger.ranks)
        if plan.dtype_measured is not None:
            print(f"--dtype=auto: {plan.dtype_measured}", flush=True)
        ready = rank.set_up(plan.config, plan.cost, plan.longest_prompt, say=lambda line: print(line, flush=True))
        results = Results(plan.out, answers(plan.tokenizer, plan.requests))
        _check_models(plan, ready)
        ssd = _ssd_contents(plan, ready)
        settings = _settings(plan, ready, ssd)
        with decision_time() as time_limit, Progress(len(plan.requests)) as progress:
            conductor = settings.conductor(time_limit)
            duration = rank.run(conductor, plan.requests, plan.limits, ssd, results, progress)
    except UsageError as error:
        _complain(str(error))
        return EXIT_USAGE
    except SetupError as error:
        _complain(str(error))
        return EXIT_FAILED
    except Interruption:
        _complain("interrupted before the run began; nothing was served")
        return EXIT_INTERRUPTED
    finally:
        rank.stop(results)
    parts = {
        "engine": _engine(plan, ready),
        "inlined_prefills": conductor.inlined_prefills,
        "pool": _pool(conductor.view.pool),
        "prefill_mfu": _prefill_mfu(plan, ready, conductor, duration),
        "roles": conductor.roles.summary() if conductor.roles is not None else None,
        "faults": dict(conductor.scheduler.faults.most_common()),
    }
    return _report(plan, parts, settings, results, duration, rank)


def _check_models(plan: Plan, ready: dict[str, Ready]) -> None:
    """KVCache of one model means nothing to another, and hosts may hold different files under one name."""
    for node, message in ready.items():
        if message.fingerprint != plan.fingerprint:
            raise UsageError(
                f"{node} has loaded other weights than rank 0: --model={plan.config.model} must be the same"
            )


def _ssd_contents(plan: Plan, ready: dict[str, Ready]) -> dict[str, SSDContents]:
    """By prefill instance."""
    return {
        instance: put_together({node: ready[node] for node in plan.config.stage_nodes(instance)})
        for instance in plan.config.prefill_nodes
    }


def _settings(plan: Plan, ready: dict[str, Ready], ssd: dict[str, SSDContents]) -> ActorSettings:
    return ActorSettings(
        config=plan.config,
        slots={
            instance: min(ready[node].slots for node in plan.config.stage_nodes(instance))
            for instance in plan.config.prefill_nodes
        },
        ssd_blocks={instance: contents.blocks for instance, contents in ssd.items()},
        cost=plan.cost or fit_cost([message.measured for message in ready.values()], plan.config.prefill_chunk),
        steps={node: message.step for node, message in ready.items() if message.step is not None},
        bytes_per_token=plan.config.block_layout(plan.model).bytes_per_token,
        stop_ids=stop_ids(plan.tokenizer),
    )


def _report(
    plan: Plan, parts: dict, settings: ActorSettings, results: Results, duration: float, rank: ConductorRank
) -> int:
    slo = SLO(plan.config.ttft_slo, plan.config.tbt_slo)
    summary = metrics.summarise(results.outcomes, slo, duration) | parts
    run = {"interrupted": rank.interrupted, "sent_bytes": rank.sent_bytes, "workload": plan.workload}
    results.finish(summary | run | {"settings": settings.to_json()})
    order = {request.id: place for place, request in enumerate(plan.requests)}
    print_results(sorted(results.outcomes, key=lambda outcome: order[outcome.id]), summary)
    print(f"results are in {results.out}")
    if rank.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if summary["requests"][FAILED] else 0


def _pool(pool: KVCachePool) -> dict[str, Any]:
    """For the summary: blocks found at the end, and how many began or ceased to be found, by tier and cause."""
    changes = {tier: {cause: pool.counts[tier, cause] for cause in Cause if pool.counts[tier, cause]} for tier in TIERS}
    blocks = {node: dict(zip(TIERS, counts)) for node, counts in pool.blocks().items()}
    return {"blocks": blocks, "changes": changes, "unwritten": pool.unwritten}


def _prefill_mfu(plan: Plan, ready: dict[str, Ready], conductor: Conductor, duration: float) -> dict[str, Any]:
    """For the summary: the share of the prefill instances' peak that the run made use of."""
    flops = {node: work.flops(plan.model) for node, work in conductor.prefill_work.items()}
    peak = {
        instance: sum(ready[node].measured.peak_flops for node in plan.config.stage_nodes(instance))
        for instance in plan.config.prefill_nodes
    }
    return prefill_mfu(flops, peak, duration, plan.config.prefill_mfu_floor)


def _engine(plan: Plan, ready: dict[str, Ready]) -> dict[str, Any]:
    """How the engines computed, for the summary."""
    return {
        "dtype": plan.config.dtype,
        "dtype_measured": plan.dtype_measured,
        "compiled": {node: message.compiled for node, message in ready.items()},
        "warm_up_s": {node: message.warm_up_s for node, message in ready.items()},
    }


def _complain(problem: str) -> None:
    print(f"mooncake-jax replay: {problem}", file=sys.stderr, flush=True)
