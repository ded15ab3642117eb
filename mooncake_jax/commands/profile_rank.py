"""What the two ranks of `mooncake-jax profile` do: rank 0 measures a prefill instance, a decoding engine and what it
sends, and fits; rank 1 receives.
"""

import os
import signal
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import NoReturn

import jax
from mpi4py import MPI

from mooncake_jax.cache.layout import BlockLayout
from mooncake_jax.cache.messenger import Messenger
from mooncake_jax.cache.transport import AUTO, choose_transport
from mooncake_jax.cluster.control import Stop
from mooncake_jax.cluster.launch import leave_exit_code
from mooncake_jax.cluster.measure import PROBE_DEADLINE_S, busy_cores, load_s, step_s, transfer_s
from mooncake_jax.commands.profile import ROOM, ProfileJob
from mooncake_jax.commands.profile_instance import ProfiledInstance
from mooncake_jax.commands.profile_links import ReceivingEnd, SendingEnd, ToRankOne
from mooncake_jax.commands.profile_points import LOAD, PREFILL, STEP, TRANSFER, Points, Shapes, fit_and_judge, shapes
from mooncake_jax.commands.profile_report import draw, print_fits
from mooncake_jax.commands.progress import WorkProgress
from mooncake_jax.errors import UsageError
from mooncake_jax.model.loading import load_model
from mooncake_jax.model.sources import model_fingerprint
from mooncake_jax.parallel.compiling import enable_compile_cache
from mooncake_jax.parallel.decoding import DecodingEngine
from mooncake_jax.parallel.prefill import PrefillEngine
from mooncake_jax.sched.cost_file import CostFile, write_cost_file

LEAVE_DEADLINE_S = 5
STEPS = 4  # at a time
EXIT_FAILED, EXIT_USAGE = 1, 2

# Part of the cost model, place of the point, weight of the work (in prefilled tokens, roughly), what measures its
# seconds.
Work = tuple[str, tuple[int, ...], float, Callable[[], float]]


class _Engines:
    """Both engines of one model, compiled for whatever is measured on them."""

    def __init__(self, job: ProfileJob, measured: Shapes):
        enable_compile_cache(job.model_dir / "compiled")
        model = load_model(job.location, job.dtype)
        self.config = model.config
        page = job.block_size  # as in a cluster
        self.layout = BlockLayout(
            self.config.num_layers, page, self.config.num_kv_heads, self.config.head_dim, job.dtype
        )
        pages = max(batch * -(-(context + ROOM) // page) for batch, context in measured.steps)
        pages = max(pages, -(-(job.longest + ROOM) // page))
        self.prefill = PrefillEngine(model, job.prefill_chunk)
        self.decoding = DecodingEngine(model, job.max_batch, page, pages)

    def warm_up(self, longest: int) -> None:
        self.prefill.warm_up(longest)
        self.decoding.warm_up()


def run_rank(make_job: Callable[[], ProfileJob]) -> NoReturn:
    """Called under an alarm, which ends once both ranks have met."""
    comm = MPI.COMM_WORLD
    end = SendingEnd() if comm.Get_rank() == 0 else ReceivingEnd()
    messenger = Messenger(comm, end)
    signal.alarm(0)
    code = 0
    if comm.Get_size() != 2:
        code = _complain(f"mpiexec started {comm.Get_size()} ranks; start 2", EXIT_USAGE) if not comm.Get_rank() else 0
        _leave(code, quiet=True)
    if comm.Get_rank() == 0:
        messenger.start()
        code = _measure_and_write(make_job, messenger, end)
        messenger.send(1, Stop())
        leave_exit_code(code)
    else:
        end.serve(messenger)
    _leave(code, messenger.close())


def _measure_and_write(make_job: Callable[[], ProfileJob], messenger: Messenger, end: SendingEnd) -> int:
    try:
        job = make_job()
        measured = shapes(job.longest, job.max_batch, job.block_size)
        print(f"loading {job.model} as {job.dtype}, and compiling", flush=True)
        engines = _Engines(job, measured)
        engines.warm_up(job.longest)
        links = ToRankOne(messenger, end, choose_transport(AUTO, jax.default_backend(), 1)[0])
        instance = ProfiledInstance(
            engines.prefill, engines.config, engines.layout, job.longest, links, PROBE_DEADLINE_S
        )
        points = _measure(job, list(_work(measured, instance, engines, links)))
        cost, fits = fit_and_judge(points, job.prefill_chunk)
        busy = _busy_cores(job, measured, instance, engines, links)
        file = CostFile(job.model, model_fingerprint(job.location, job.dtype), measured.range, cost, busy)
        write_cost_file(job.out, file)
    except UsageError as error:
        return _complain(str(error), EXIT_USAGE)
    except TimeoutError:
        return _complain(f"a transfer to rank 1 did not end within {PROBE_DEADLINE_S:g} s", EXIT_FAILED)
    except Exception as error:
        return _complain(f"{type(error).__name__}: {' '.join(str(error).split())}", EXIT_FAILED)
    print_fits(fits)
    picture = draw(points, cost, job.out.with_suffix(".png"))
    print(f"the cost model of {job.model} is in {job.out}{picture}", flush=True)
    return 0


def _measure(job: ProfileJob, work: list[Work]) -> Points:
    """All points, in rounds over all of them, so that what else the machine does for a while falls on none alone. The
    median counts, which is what a cluster sees.
    """
    total, done = job.repeats * sum(weight for *_, weight, _ in work), 0.0
    seconds: list[list[float]] = [[] for _ in work]
    with WorkProgress("measuring", "measured") as progress:
        for _ in range(job.repeats):
            for (_, _, weight, measure), rounds in zip(work, seconds, strict=True):
                rounds.append(measure())
                done += weight
                progress.update(done, total)
    points: dict[str, list[tuple]] = {PREFILL: [], STEP: [], TRANSFER: [], LOAD: []}
    for (part, place, *_), rounds in zip(work, seconds, strict=True):
        taken = statistics.median(rounds)
        if taken > 0:  # a difference of two times may not be
            points[part].append((*place, taken))
    return points


def _busy_cores(
    job: ProfileJob, measured: Shapes, instance: ProfiledInstance, engines: _Engines, links: ToRankOne
) -> tuple[float, float] | None:
    """Of the longest prefill, what receives it included, and of steps of the largest batch; None where a device of its
    own computes.
    """
    if jax.default_backend() != "cpu":
        return None
    batch, context = max(measured.steps)
    prefill = partial(instance.prefill_s, job.longest, 0)
    steps = partial(step_s, engines.decoding, engines.layout, batch, context, ROOM - 2)
    return busy_cores(prefill, job.repeats, links.cpu_s), busy_cores(steps, job.repeats, links.cpu_s)


def _work(measured: Shapes, instance: ProfiledInstance, engines: _Engines, links: ToRankOne) -> Iterator[Work]:
    layout, decoding = engines.layout, engines.decoding
    for tokens, prefix in measured.prefill:
        yield PREFILL, (tokens, prefix), tokens - prefix + 16, partial(instance.prefill_s, tokens, prefix)
    for batch, context in measured.steps:
        run = partial(step_s, decoding, layout, batch, context, STEPS)
        yield STEP, (batch, batch * context), STEPS * (16 + 4 * batch) + batch * context / 16, run
    for tokens in measured.loads:
        run = partial(load_s, decoding, layout, tokens, STEPS)
        yield LOAD, (tokens * layout.bytes_per_token,), STEPS * (32 + tokens / 16), run
    for nbytes, flows in measured.transfers:
        run = partial(transfer_s, links, "", nbytes, flows, 1)
        yield TRANSFER, (nbytes, flows), 1 + nbytes * flows / 2**22, run


def _complain(problem: str, code: int) -> int:
    print(f"mooncake-jax profile: {problem}", file=sys.stderr, flush=True)
    return code


def _leave(code: int, quiet: bool) -> NoReturn:
    """End MPI in good order, by force after a deadline. quiet: whether nothing of this rank is under way in it."""
    sys.stdout.flush()
    # Not a thread's timer: MPI_Finalize may wait for a dead peer without letting other threads run.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LEAVE_DEADLINE_S)
    if quiet:
        MPI.Finalize()
    os._exit(code)
