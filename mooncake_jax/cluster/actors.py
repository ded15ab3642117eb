"""The actors of a cluster, made from plain settings: on the ranks, and again when a recorded run is replayed."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from mooncake_jax.cluster.config import ClusterConfig
from mooncake_jax.cluster.record import protocol
from mooncake_jax.field_types import check_fields
from mooncake_jax.sched.conductor import Conductor
from mooncake_jax.sched.cost import CostModel
from mooncake_jax.sched.cost_file import cost_from_json, cost_to_json
from mooncake_jax.sched.cost_padded import PaddedCost
from mooncake_jax.sched.decoding import DecodingInstance, DecodingLimits, StepCost
from mooncake_jax.sched.elastic_instance import together
from mooncake_jax.sched.making import Capacities, make_conductor
from mooncake_jax.sched.messages import CONDUCTOR
from mooncake_jax.sched.plugins import SERVING_ALL
from mooncake_jax.sched.prefill import PrefillInstance
from mooncake_jax.sched.scheduler import NO_TIME_LIMIT, TimeLimit
from mooncake_jax.sched.serve import Actor

LIMITS = ("ttft_slo", "tbt_slo", "kvcache_balancing_threshold")  # JSON has no infinity: written as null


@dataclass(frozen=True)
class ActorSettings:
    """Everything that decides how the actors of one run behave. slots and ssd_blocks: blocks that the DRAM and the SSD
    of each prefill instance hold; cost: what Conductor believes; steps: step_coefficients of each instance that may
    decode, as it has measured itself; of those that have not, those of `cost` hold.
    """

    config: ClusterConfig
    slots: dict[str, int]
    ssd_blocks: dict[str, int]
    cost: CostModel
    steps: dict[str, tuple[float, float, float]]
    bytes_per_token: int
    stop_ids: tuple[int, ...]

    def actors(self, time_limit: TimeLimit = NO_TIME_LIMIT) -> dict[str, Actor]:
        """Fresh actors, by node. time_limit: of each of Conductor's decisions; in a cluster that of time_limit.py."""
        prefill = {node: prefill_instance(node, self.config) for node in self.config.prefill_nodes}
        decoding = {
            node: decoding_instance(node, self.config, self.stop_ids, self._step_cost(node))
            for node in self.config.may_decode
        }
        return {CONDUCTOR: self.conductor(time_limit), **together(prefill, decoding)}

    def _step_cost(self, node: str) -> StepCost:
        return measured_steps(self.steps[node]) if node in self.steps else self.cost

    def conductor(self, time_limit: TimeLimit = NO_TIME_LIMIT) -> Conductor:
        capacities = Capacities(self.slots, self.ssd_blocks, self.bytes_per_token)
        return make_conductor(self.config, capacities, self.cost, time_limit)

    def to_json(self) -> dict[str, Any]:
        """from_json takes it back from JSON, of the same protocol."""
        settings = dataclasses.asdict(self) | {"cost": cost_to_json(self.cost), "protocol": protocol()}
        for name in LIMITS:
            if math.isinf(settings["config"][name]):
                settings["config"][name] = None
        return settings

    @classmethod
    def from_json(cls, settings: dict[str, Any]) -> "ActorSettings":
        """Raises UsageError for a wrong cost model, and LookupError, TypeError or the like for other fields."""
        config = {n: math.inf if v is None and n in LIMITS else v for n, v in settings["config"].items()}
        check_fields(ClusterConfig, config)
        steps = {node: tuple(coefficients) for node, coefficients in settings["steps"].items()}
        stop_ids = tuple(settings["stop_ids"])
        plain = {name: settings[name] for name in ("slots", "ssd_blocks", "bytes_per_token")}
        check_fields(cls, plain | {"steps": steps, "stop_ids": stop_ids})
        return cls(
            ClusterConfig(**config),
            settings["slots"],
            settings["ssd_blocks"],
            cost_from_json(settings["cost"], "cost"),
            steps,
            settings["bytes_per_token"],
            stop_ids,
        )


def prefill_instance(node: str, config: ClusterConfig) -> PrefillInstance:
    return PrefillInstance(node, config.stages)


def measured_steps(coefficients: tuple[float, float, float]) -> StepCost:
    """What a decoding instance believes of its own steps: step_coefficients that it has fitted to its measurements."""
    return PaddedCost((0.0, 0.0, 0.0), coefficients, (0.0, 0.0), chunk=1)


def decoding_instance(node: str, config: ClusterConfig, stop_ids: tuple[int, ...], steps: StepCost) -> DecodingInstance:
    """steps: of its own. An admission that serves every request is not overruled by it."""
    limits = DecodingLimits(
        config.max_batch, config.decoding_pages, config.block_size, frozenset(stop_ids), config.tbt_slo
    )
    return DecodingInstance(node, limits, steps if config.admission != SERVING_ALL else None)
