"""The actors of a simulated cluster: those that serve on real ranks (sched/)."""

from dataclasses import replace

from mooncake_jax.errors import UsageError
from mooncake_jax.sched.batched_prefill import BatchedPrefillInstance
from mooncake_jax.sched.cost import CostModel
from mooncake_jax.sched.coupled import COUPLED_MODES, CoupledInstance
from mooncake_jax.sched.decoding import DecodingInstance, DecodingLimits
from mooncake_jax.sched.elastic_instance import together
from mooncake_jax.sched.making import Capacities, make_conductor
from mooncake_jax.sched.messages import CONDUCTOR
from mooncake_jax.sched.plugins import COUPLED_POLICIES, POLICIES, SERVING_ALL
from mooncake_jax.sched.prefill import PrefillInstance
from mooncake_jax.sched.scheduler import NO_TIME_LIMIT, TimeLimit
from mooncake_jax.sched.serve import Actor
from mooncake_jax.simulate.config import SimulationConfig
from mooncake_jax.simulate.group import GroupCost


def make_actors(config: SimulationConfig, cost: CostModel, time_limit: TimeLimit = NO_TIME_LIMIT) -> dict[str, Actor]:
    """Fresh ones, by node; cost: what Conductor believes of one node; time_limit: of each of its decisions. Raises
    UsageError where a policy or an admission cannot be loaded, or makes no sense with coupled instances.
    """
    if config.cores is None and not config.coupled:  # else it takes what the cost model says, overlap or none included
        cost = GroupCost(config, cost)
    dram = dict.fromkeys(config.prefill_nodes, config.dram_blocks)
    ssd = dict.fromkeys(config.prefill_nodes, config.ssd_blocks)
    conductor = make_conductor(config, Capacities(dram, ssd, config.bytes_per_token), cost, time_limit)
    limits = DecodingLimits(config.max_batch, config.decoding_pages, config.block_size, tbt_slo=config.tbt_slo)
    if config.coupled:
        return {CONDUCTOR: conductor, **_coupled(config, limits)}
    step_cost = cost if config.recheck and config.admission != SERVING_ALL else None
    prefill = {node: _prefill(node, config) for node in config.prefill_nodes}
    decoding = {node: DecodingInstance(node, limits, step_cost) for node in config.may_decode}
    return {CONDUCTOR: conductor, **together(prefill, decoding)}


def _prefill(node: str, config: SimulationConfig) -> PrefillInstance:
    if config.batched_prefill:
        return BatchedPrefillInstance(node, config.token_budget, config.block_size, config.rematch)
    return PrefillInstance(node, config.stages, config.rematch)


def _coupled(config: SimulationConfig, limits: DecodingLimits) -> dict[str, Actor]:
    if config.policy in POLICIES and config.policy not in COUPLED_POLICIES:
        raise UsageError(
            f"--policy={config.policy}: coupled instances share no KVCache that it could go by; use one of "
            f"{', '.join(COUPLED_POLICIES)}"
        )
    mode = COUPLED_MODES[config.coupled_mode]
    if config.token_budget is not None:
        mode = replace(mode, token_budget=config.token_budget)
    return {node: CoupledInstance(node, limits, mode) for node in config.coupled_nodes}
