"""The actors of a cluster, made from plain settings: on the ranks, and again when a recorded run is replayed."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from mooncake_jax.cache.pool import KVCachePool
from mooncake_jax.cluster.config import ClusterConfig
from mooncake_jax.request import SLO
from mooncake_jax.sched.conductor import Conductor
from mooncake_jax.sched.cost import PolynomialCost
from mooncake_jax.sched.decoding import DecodingInstance, DecodingLimits
from mooncake_jax.sched.messages import CONDUCTOR
from mooncake_jax.sched.policy import ClusterView, DecodingLoad, KVCacheCentric, PrefillQueue
from mooncake_jax.sched.prefill import PrefillInstance
from mooncake_jax.sched.serve import Actor

LIMITS_IN_SECONDS = ("ttft_slo", "tbt_slo")  # JSON has no infinity: written as null


@dataclass(frozen=True)
class ActorSettings:
    """Everything that decides how the actors of one run behave. slots and ssd_blocks: blocks that
    the DRAM and the SSD of each prefill instance hold.
    """

    config: ClusterConfig
    slots: dict[str, int]
    ssd_blocks: dict[str, int]
    cost: PolynomialCost
    bytes_per_token: int
    stop_ids: tuple[int, ...]

    def actors(self) -> dict[str, Actor]:
        """Fresh actors, by node."""
        return {
            CONDUCTOR: self.conductor(),
            **{node: prefill_instance(node, self.config) for node in self.config.prefill_nodes},
            **{node: decoding_instance(node, self.config, self.stop_ids) for node in self.config.decoding_nodes},
        }

    def conductor(self) -> Conductor:
        config = self.config
        view = ClusterView(
            prefill={node: PrefillQueue() for node in config.prefill_nodes},
            decoding={node: DecodingLoad() for node in config.decoding_nodes},
            pool=KVCachePool(self.slots, config.eviction, self.ssd_blocks),
            cost=self.cost,
            slo=SLO(config.ttft_slo, config.tbt_slo),
            block_size=config.block_size,
            bytes_per_token=self.bytes_per_token,
        )
        return Conductor(view, KVCacheCentric(), config.request_timeout)

    def to_json(self) -> dict[str, Any]:
        settings = dataclasses.asdict(self)
        for name in LIMITS_IN_SECONDS:
            if math.isinf(settings["config"][name]):
                settings["config"][name] = None
        return settings

    @classmethod
    def from_json(cls, settings: dict[str, Any]) -> "ActorSettings":
        config = {n: math.inf if v is None and n in LIMITS_IN_SECONDS else v for n, v in settings["config"].items()}
        cost = {name: tuple(values) for name, values in settings["cost"].items()}
        return cls(
            ClusterConfig(**config),
            settings["slots"],
            settings["ssd_blocks"],
            PolynomialCost(**cost),
            settings["bytes_per_token"],
            tuple(settings["stop_ids"]),
        )


def prefill_instance(node: str, config: ClusterConfig) -> PrefillInstance:
    return PrefillInstance(node, config.stages)


def decoding_instance(node: str, config: ClusterConfig, stop_ids: tuple[int, ...]) -> DecodingInstance:
    limits = DecodingLimits(config.max_batch, config.decoding_pages, config.block_size, frozenset(stop_ids))
    return DecodingInstance(node, limits)
