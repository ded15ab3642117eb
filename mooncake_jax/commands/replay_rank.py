"""What one MPI rank does in `mooncake-jax replay`: rank 0 runs Conductor and reports, the others become instances."""

import dataclasses
import math
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from mpi4py import MPI

from mooncake_jax import metrics
from mooncake_jax.cluster.conductor_rank import ConductorRank, Interruption, SetupError, believed_cluster
from mooncake_jax.cluster.instance import InstanceRank
from mooncake_jax.cluster.rank import Rank
from mooncake_jax.cluster.results import Results
from mooncake_jax.commands.plan import Plan
from mooncake_jax.errors import UsageError
from mooncake_jax.report import Progress, print_results
from mooncake_jax.request import FAILED, SLO
from mooncake_jax.sched.policy import ClusterView

LEAVE_DEADLINE_S = 5.0
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def run_rank(make_plan: Callable[[], Plan]) -> NoReturn:
    comm = MPI.COMM_WORLD
    if comm.Get_rank() == 0:
        rank: Rank = ConductorRank(comm)
        work = lambda: _conduct(rank, make_plan)  # noqa: E731
    else:
        rank = InstanceRank(comm)
        work = rank.run
    try:
        code = work()
    except Exception as error:
        _complain(f"rank {comm.Get_rank()}: {type(error).__name__}: {error}")
        code = EXIT_FAILED
    _leave(rank, code)


def _leave(rank: Rank, code: int) -> NoReturn:
    """End MPI in good order, by force after a deadline: a dead peer or a thread that still computes must not keep the rank."""
    sys.stdout.flush()
    watchdog = threading.Timer(LEAVE_DEADLINE_S, os._exit, (code or EXIT_FAILED,))
    watchdog.daemon = True
    watchdog.start()
    rank.messenger.close(LEAVE_DEADLINE_S / 2)
    MPI.Finalize()
    os._exit(code)


def _conduct(rank: ConductorRank, make_plan: Callable[[], Plan]) -> int:
    results = None
    try:
        plan = make_plan()
        _check_ranks(plan, rank.messenger.ranks)
        ready = rank.set_up(plan.config, say=lambda line: print(line, flush=True))
        results = Results(plan.out, plan.tokenizer.decode if plan.tokenizer is not None else None)
        view = believed_cluster(plan.config, ready, plan.config.block_layout(plan.model).bytes_per_token)
        with Progress(len(plan.requests)) as progress:
            duration = rank.run(plan.requests, plan.limits, view, results, progress)
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
    return _report(plan, view, results, duration, rank.interrupted)


def _check_ranks(plan: Plan, ranks: int) -> None:
    config = plan.config
    needed = len(config.nodes)
    if ranks != needed:
        raise UsageError(
            f"mpiexec started {ranks} ranks, but Conductor, --prefill={config.prefill} and --decode={config.decode} need "
            f"{needed}: start {needed}, or change the flags"
        )


def _report(plan: Plan, view: ClusterView, results: Results, duration: float, interrupted: bool) -> int:
    slo = SLO(plan.config.ttft_slo, plan.config.tbt_slo)
    summary = metrics.summarise(results.outcomes, slo, duration)
    results.finish(summary | {"interrupted": interrupted, "flags": _finite(plan.flags), "cost": dataclasses.asdict(view.cost)})
    order = {request.id: place for place, request in enumerate(plan.requests)}
    print_results(sorted(results.outcomes, key=lambda outcome: order[outcome.id]), summary)
    print(f"results are in {results.out}")
    if interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if summary["requests"][FAILED] else 0


def _finite(flags: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: a limit that is none becomes null."""
    return {name: None if isinstance(v, float) and math.isinf(v) else v for name, v in flags.items()}


def _complain(problem: str) -> None:
    print(f"mooncake-jax replay: {problem}", file=sys.stderr, flush=True)
