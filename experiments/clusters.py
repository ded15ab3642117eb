"""Simulated clusters for figures: the traces that they serve, a run, and what figures count of its outcomes.

trace = released(FLAGS, "conversation")
served = run(trace.requests(speed=2), "fast25", prefill=8, decode=8)
capacity(served.outcomes, tbt_limit=0.1, ttft_limit=30)
"""

import bisect
import functools
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from absl import flags

from mooncake_jax.commands.reading import read_rows
from mooncake_jax.errors import UsageError
from mooncake_jax.metrics import attained
from mooncake_jax.request import COMPLETED, SLO, Outcome, Request
from mooncake_jax.sched.cost import CostModel
from mooncake_jax.sched.profiles import profile
from mooncake_jax.simulate.config import config_of
from mooncake_jax.simulate.run import Run, simulate
from mooncake_jax.simulate.traces import keyed_requests
from mooncake_jax.workload.released import RELEASED
from mooncake_jax.workload.surrogate import RATE, REQUESTS, SHAPES, surrogate_rows
from mooncake_jax.workload.trace import TraceRow

MODEL = "llama2-70b"
QUICK_REQUESTS = 100  # with --quick, of any trace


@dataclass(frozen=True)
class Trace:
    """label: as the fidelity table names it."""

    label: str
    rows: Sequence[TraceRow]

    def requests(self, speed: float = 1.0) -> list[Request]:
        """speed divides the arrival times. Raises UsageError."""
        return keyed_requests(self.rows, speed)


def released(values: flags.FlagValues, name: str) -> Trace:
    """FAST25's `conversation`, `synthetic` or `toolagent`, from --traces. Raises UsageError."""
    file = Path(values.traces) / RELEASED[name].file_name
    if file.is_file():
        return Trace(f"{name} (real)", _read(file, _limit(values)))
    raise UsageError(
        f"--traces={values.traces}: {file} is missing; `mooncake-jax trace get {name} --dir={values.traces}` brings it"
    )


def reports(values: flags.FlagValues, seed: int = 0) -> Trace:
    """The report's own trace from --trace, else its surrogate of this seed. Raises UsageError."""
    if values.trace is None:
        return Trace("surrogate of the report's", _surrogate("surrogate-report", _limit(values), seed))
    return Trace(f"{Path(values.trace).name} (real)", _read(Path(values.trace), _limit(values)))


def run(
    requests: Sequence[Request], cost: str | CostModel = "micro", believed: str | CostModel | None = None, **fields: Any
) -> Run:
    """Serve them as `mooncake-jax simulate --cost=...` does, with these fields of SimulationConfig.

    cost: a profile by name, or a cost model; believed: what Conductor believes of it, None: the same. Raises UsageError
    and simulate.run.Stuck.
    """
    belief = None if believed is None else _cost(believed)
    return simulate(config_of(MODEL, **fields), _cost(cost), requests, believed=belief)


def capacity(outcomes: Iterable[Outcome], tbt_limit: float, ttft_limit: float = math.inf) -> float:
    """Per cent of all requests, the rejected and failed ones too, that completed with TTFT and TBT (mean of the longest
    10 % of gaps) within these seconds: the request capacity of FAST25 figures 1, 6 and 7.
    """
    outcomes = list(outcomes)
    limits = SLO(ttft_limit, tbt_limit)
    return 100 * sum(attained(outcome, limits) for outcome in outcomes) / len(outcomes)


def capacity_curve(outcomes: Iterable[Outcome], ttft_limit: float = math.inf) -> list[tuple[float, float]]:
    """(TBT limit in seconds, capacity in per cent), rising: the whole curve of FAST25 figure 1."""
    outcomes = list(outcomes)
    within = [outcome for outcome in outcomes if attained(outcome, SLO(ttft_limit, math.inf))]
    tbts = sorted(outcome.tbt_top10_s or 0.0 for outcome in within)
    return [(tbt, 100 * place / len(outcomes)) for place, tbt in enumerate(tbts, 1)]


def cdf(values: Iterable[float]) -> list[tuple[float, float]]:
    """(value, share of all up to and with it), rising."""
    ordered = sorted(values)
    return [(value, place / len(ordered)) for place, value in enumerate(ordered, 1)]


def share_within(values: Sequence[float], limit: float) -> float:
    """Share of the values that are at most the limit."""
    return bisect.bisect_right(sorted(values), limit) / len(values)


def completed(outcomes: Iterable[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.status == COMPLETED]


def _cost(cost: str | CostModel) -> CostModel:
    return profile(cost) if isinstance(cost, str) else cost


def _limit(values: flags.FlagValues) -> int | None:
    return QUICK_REQUESTS if values.quick else None


@functools.cache
def _read(file: Path, limit: int | None) -> Sequence[TraceRow]:
    return tuple(read_rows(str(file), Path(sys.argv[0]).stem, limit)[0])


@functools.cache
def _surrogate(name: str, limit: int | None, seed: int = 0) -> Sequence[TraceRow]:
    return tuple(surrogate_rows(SHAPES[name], REQUESTS, RATE, seed)[:limit])
