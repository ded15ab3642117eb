"""What a cluster of ranks is made of: which rank is what, and with which model and memory."""

from dataclasses import dataclass

from mooncake_jax.cache.store import BlockLayout
from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.parallel.mesh import MeshShape
from mooncake_jax.sched.messages import CONDUCTOR


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Rank 0 is Conductor, then come the prefill instances, a rank for each of their stages, then the decoding
    instances.

    tp: devices of each stage; dram_mib: MiB of DRAM that each stage lends to the KVCache pool; eviction: which block of
    the pool leaves first (cache/eviction.py); ssd_dir: where each stage keeps its SSD tier, in a folder of its name,
    None for none; ssd_mib: MiB that it may take there; device_kv_tokens: tokens of KVCache that a decoding instance
    holds in device memory; policy, admission: their names (sched/plugins.py); decoding_time_s: t_d of an admission that
    predicts with it, None to learn it; cost: name or file of the cost model that Conductor believes
    (sched/cost_file.py), None to have it measured; seed: of a policy that draws; request_timeout in seconds from
    arrival; link_gbps: the modelled rate of what an instance's rank sends, None for as fast as it goes; transport: how
    KVCache leaves the devices (cache/transport.py); peak_tflops: of each prefill device, in 1e12 FLOPs a second, None
    to measure it; prefill_mfu_floor: the least MFU that the prefill pool is to reach (sched/mfu.py), None for no bound;
    elastic_roles: whether prefill instances decode while decoding is short of instances (sched/elastic.py), once that
    has lasted for elastic_after_s seconds; inline_prefill: whether decoding instances compute prompts that need no
    chunk (sched/inline.py).
    """

    model: str
    model_dir: str
    dtype: str
    prefill: int
    stages: int
    tp: int
    decode: int
    prefill_chunk: int
    block_size: int
    dram_mib: int
    eviction: str
    ssd_dir: str | None
    ssd_mib: int
    device_kv_tokens: int
    max_batch: int
    link_gbps: float | None
    transport: str
    policy: str
    kvcache_balancing_threshold: float
    admission: str
    decoding_time_s: float | None
    cost: str | None
    seed: int
    request_timeout: float
    ttft_slo: float
    tbt_slo: float
    peak_tflops: float | None
    prefill_mfu_floor: float | None
    elastic_roles: bool
    elastic_after_s: float
    inline_prefill: bool

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names by rank."""
        stages = (node for instance in self.prefill_nodes for node in self.stage_nodes(instance))
        return (CONDUCTOR, *stages, *self.decoding_nodes)

    @property
    def prefill_nodes(self) -> tuple[str, ...]:
        return tuple(f"prefill{i}" for i in range(self.prefill))

    @property
    def decoding_nodes(self) -> tuple[str, ...]:
        return tuple(f"decode{i}" for i in range(self.decode))

    @property
    def may_decode(self) -> tuple[str, ...]:
        """All instances that can be asked to."""
        return self.decoding_nodes + (self.prefill_nodes if self.elastic_roles else ())

    def stage_nodes(self, instance: str) -> tuple[str, ...]:
        """The ranks of a prefill instance; the first one speaks for it."""
        return tuple(stage_node(instance, stage) for stage in range(self.stages))

    @property
    def mesh_shape(self) -> MeshShape:
        """Of each prefill instance."""
        return MeshShape(self.stages, self.tp)

    @property
    def lends_dram(self) -> bool:
        """Whether ranks read one another's DRAM: prefill instances copy blocks from one another."""
        return self.prefill > 1

    @property
    def decoding_pages(self) -> int:
        """Pages of one block each in a decoding instance's device memory."""
        return self.device_kv_tokens // self.block_size

    def block_layout(self, model: LlamaConfig) -> BlockLayout:
        """Of a whole block."""
        return self._layout(model, model.num_layers)

    def stage_layouts(self, model: LlamaConfig) -> tuple[BlockLayout, ...]:
        """Of the part of a block that each stage keeps: its own layers."""
        return tuple(self._layout(model, len(layers)) for layers in self.mesh_shape.stages(model.num_layers))

    def _layout(self, model: LlamaConfig, layers: int) -> BlockLayout:
        return BlockLayout(layers, self.block_size, model.num_kv_heads, model.head_dim, self.dtype)


def stage_node(instance: str, stage: int) -> str:
    """Name of the rank with a stage of an instance."""
    return f"{instance}.{stage}" if stage else instance


def instance_of(node: str) -> str:
    """The instance that a rank is part of, by its name."""
    return node.partition(".")[0]
