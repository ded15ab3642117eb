"""The actors of a simulated cluster: those that serve on real ranks (sched/)."""

from mooncake_jax.sched.cost import CostModel
from mooncake_jax.sched.decoding import DecodingInstance, DecodingLimits
from mooncake_jax.sched.making import Capacities, make_conductor
from mooncake_jax.sched.messages import CONDUCTOR
from mooncake_jax.sched.plugins import SERVING_ALL
from mooncake_jax.sched.prefill import PrefillInstance
from mooncake_jax.sched.serve import Actor
from mooncake_jax.simulate.config import SimulationConfig
from mooncake_jax.simulate.group import GroupCost


def make_actors(config: SimulationConfig, cost: CostModel) -> dict[str, Actor]:
    """Fresh ones, by node; cost: what Conductor believes of one node. Raises UsageError where a policy or an admission
    cannot be loaded.
    """
    if config.stages > 1:
        cost = GroupCost(cost, config.stages, config.prefill_chunk)
    dram = dict.fromkeys(config.prefill_nodes, config.dram_blocks)
    ssd = dict.fromkeys(config.prefill_nodes, config.ssd_blocks)
    conductor = make_conductor(config, Capacities(dram, ssd, config.bytes_per_token), cost)
    limits = DecodingLimits(config.max_batch, config.decoding_pages, config.block_size, tbt_slo=config.tbt_slo)
    step_cost = cost if config.recheck and config.admission != SERVING_ALL else None
    return {
        CONDUCTOR: conductor,
        **{node: PrefillInstance(node, config.stages) for node in config.prefill_nodes},
        **{node: DecodingInstance(node, limits, step_cost) for node in config.decoding_nodes},
    }
