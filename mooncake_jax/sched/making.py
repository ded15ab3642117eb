"""What Conductor is made of, from the settings of a cluster: of ranks, or in virtual time."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from mooncake_jax.cache.pool import KVCachePool
from mooncake_jax.errors import UsageError
from mooncake_jax.request import SLO
from mooncake_jax.sched.conductor import Conductor
from mooncake_jax.sched.cost import CostModel
from mooncake_jax.sched.decoding_load import DecodingLoad
from mooncake_jax.sched.elastic import DivergingLoads, ElasticRoles, RolePolicy
from mooncake_jax.sched.plugins import load_admission, load_policy
from mooncake_jax.sched.prefill_queue import PrefillQueue
from mooncake_jax.sched.scheduler import NO_TIME_LIMIT, Scheduler, TimeLimit
from mooncake_jax.sched.view import ClusterView


class Settings(Protocol):
    """What the configurations of both kinds of cluster have."""

    prefill: int
    stages: int
    prefill_chunk: int
    block_size: int
    eviction: str
    policy: str
    admission: str
    kvcache_balancing_threshold: float
    decoding_time_s: float | None
    seed: int
    ttft_slo: float
    tbt_slo: float
    request_timeout: float
    elastic_roles: bool
    elastic_after_s: float
    inline_prefill: bool

    @property
    def prefill_nodes(self) -> tuple[str, ...]: ...

    @property
    def decoding_nodes(self) -> tuple[str, ...]: ...

    @property
    def decoding_pages(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Capacities:
    """Blocks that the DRAM and the SSD of each prefill instance hold, and bytes of a token's KVCache."""

    dram: Mapping[str, int]
    ssd: Mapping[str, int]
    bytes_per_token: int


def make_conductor(
    settings: Settings, capacities: Capacities, cost: CostModel, time_limit: TimeLimit = NO_TIME_LIMIT
) -> Conductor:
    """cost: what Conductor believes. Raises UsageError where a policy or an admission cannot be loaded, and where roles
    cannot be elastic.
    """
    view = ClusterView(
        prefill={node: PrefillQueue(settings.stages, settings.prefill_chunk) for node in settings.prefill_nodes},
        decoding={node: DecodingLoad() for node in settings.decoding_nodes},
        pool=KVCachePool(capacities.dram, settings.eviction, capacities.ssd),
        cost=cost,
        slo=SLO(settings.ttft_slo, settings.tbt_slo),
        block_size=settings.block_size,
        bytes_per_token=capacities.bytes_per_token,
        kv_tokens=settings.decoding_pages * settings.block_size,
        coupled=settings.prefill_nodes == settings.decoding_nodes,
    )
    policy = make_role_policy(settings)
    roles = ElasticRoles(policy, view) if policy is not None else None
    return Conductor(view, make_scheduler(settings, time_limit), settings.request_timeout, roles)


def make_role_policy(settings: Settings) -> RolePolicy | None:
    """None where roles are fixed. Raises UsageError where they cannot be elastic."""
    if not settings.elastic_roles:
        return None
    if settings.prefill_nodes == settings.decoding_nodes:
        raise UsageError("--elastic_roles=True: coupled instances prefill and decode already; leave it out")
    if settings.stages > 1:
        raise UsageError(
            f"--prefill={settings.prefill}x{settings.stages}: a pipeline of several stages cannot decode; leave out "
            "--elastic_roles, or use instances of one stage"
        )
    if settings.prefill < 2:
        raise UsageError(
            f"--prefill={settings.prefill}: with --elastic_roles one must stay when another decodes: use 2"
        )
    for name in ("ttft_slo", "tbt_slo"):
        if math.isinf(getattr(settings, name)):
            raise UsageError(f"--{name}=inf: --elastic_roles measures load by it; give a number of seconds")
    return DivergingLoads(settings.elastic_after_s)


def make_scheduler(settings: Settings, time_limit: TimeLimit = NO_TIME_LIMIT) -> Scheduler:
    """Raises UsageError where a policy or an admission cannot be loaded."""
    policy = load_policy(settings.policy, settings.seed, settings.kvcache_balancing_threshold)
    admission = load_admission(settings.admission, settings.decoding_time_s)
    longest_inlined = settings.prefill_chunk if settings.inline_prefill else 0
    return Scheduler(policy, admission, settings.policy, settings.admission, time_limit, longest_inlined)
