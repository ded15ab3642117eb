"""mooncake-jax simulate: serve a trace on a cluster in virtual time, an hour of it in seconds.

The actors are those that serve on real ranks; a cost model stands in for engines, memories and links (simulate/).
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake_jax import metrics
from mooncake_jax.cluster.record import Recorded, protocol
from mooncake_jax.cluster.results import Results, check_writable
from mooncake_jax.cluster.time_limit import decision_time
from mooncake_jax.commands.cost_use import check_used
from mooncake_jax.commands.mfu_flags import node_peak_flops, simulated_mfu
from mooncake_jax.commands.progress import WorkProgress
from mooncake_jax.commands.reading import read_rows
from mooncake_jax.commands.simulate_flags import FLAGS, parse
from mooncake_jax.model.architectures import ARCHITECTURES
from mooncake_jax.report import print_results
from mooncake_jax.request import FAILED, SLO, Outcome, Request
from mooncake_jax.sched.cost import CostModel
from mooncake_jax.sched.cost_file import resolve_cost
from mooncake_jax.sched.serve import Actor
from mooncake_jax.simulate.actors import make_actors
from mooncake_jax.simulate.config import SimulationConfig
from mooncake_jax.simulate.run import Hosted, Run, Stuck, simulate, uncollected, why_invalid
from mooncake_jax.simulate.settings import SimulatedSettings
from mooncake_jax.simulate.traces import arrival_rate, keyed_requests

EXIT_FAILED = 1
_EVERY = 100  # requests between two looks of the progress bar


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
    with uncollected():  # reading and summing up too: a collection would look at all that the run has made
        return _simulate(config, out)


def _simulate(config: SimulationConfig, out: Path) -> int:
    """The exit code."""
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
    with decision_time() as time_limit:
        options = {"believed": simulation.believed, "check": FLAGS.check, "time_limit": time_limit}
        return simulate(config, cost, requests, ended=ended, host=host, **options)


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
