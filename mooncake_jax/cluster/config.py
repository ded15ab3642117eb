"""What a cluster of ranks is made of: which rank is what, and with which model and memory."""

from dataclasses import dataclass

from mooncake_jax.cache.store import BlockLayout
from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.sched.messages import CONDUCTOR


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Rank 0 is Conductor, then come the prefill instances, then the decoding instances.

    dram_mib: MiB of DRAM that each prefill instance lends to the KVCache pool; device_kv_tokens: tokens of KVCache
    that a decoding instance holds in device memory; request_timeout in seconds from arrival.
    """

    model: str
    model_dir: str
    dtype: str
    prefill: int
    decode: int
    prefill_chunk: int
    block_size: int
    dram_mib: int
    device_kv_tokens: int
    max_batch: int
    request_timeout: float
    ttft_slo: float
    tbt_slo: float

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names by rank."""
        return (CONDUCTOR, *self.prefill_nodes, *self.decoding_nodes)

    @property
    def prefill_nodes(self) -> tuple[str, ...]:
        return tuple(f"prefill{i}" for i in range(self.prefill))

    @property
    def decoding_nodes(self) -> tuple[str, ...]:
        return tuple(f"decode{i}" for i in range(self.decode))

    @property
    def decoding_pages(self) -> int:
        """Pages of one block each in a decoding instance's device memory."""
        return self.device_kv_tokens // self.block_size

    def block_layout(self, model: LlamaConfig) -> BlockLayout:
        return BlockLayout(model.num_layers, self.block_size, model.num_kv_heads, model.head_dim, self.dtype)
