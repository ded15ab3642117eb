"""What a simulated cluster is made of."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from mooncake_jax.model.architectures import ARCHITECTURES
from mooncake_jax.sched.plugins import DEFAULT_COUPLED_POLICY
from mooncake_jax.sched.profiles import SCHEDULE_S

# What of the hardware can be left out, to see what it contributes.
PARTS = {
    "overlap": "layer-wise prefill: without it loading and computing take what the cost model says for both, and "
    "KVCache is sent once all is computed",
    "sharing": "transfers share NICs: without it each is as fast as if it were alone",
    "network": "transfers between instances take time",
    "loading": "moving KVCache from DRAM to the devices takes time",
    "storing": "moving KVCache from the devices to DRAM takes time",
    "ssd": "reading and writing SSDs takes time",
}
PREFIX_SENDERS = ("prefill", "any")  # simulate/senders.py
_DTYPE = "bfloat16"  # of KVCache
UNLIMITED = (
    "ttft_slo",
    "tbt_slo",
    "request_timeout",
    "kvcache_balancing_threshold",
    "prefill_cores",
    "step_cores",
)  # JSON has no infinity: written as null


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """prefill instances of `stages` nodes each, and decoding instances of one node (report 3 and 5.1); or `coupled`
    instances of one node, if there are any, which do both (sched/coupled.py).

    coupled_mode: one of its COUPLED_MODES; token_budget: of their iterations with prefill, None: as the mode has it, or
    of a batch of prefills, None: no limit; drop_over: longer prompts are rejected, None: none for being long.

    bytes_per_token: of KVCache, in `layers` layers; dram_bytes and ssd_bytes: what each prefill node lends to the
    KVCache pool; device_kv_tokens: KVCache in a decoding instance's device memory; link_bytes_per_s: that a node's NIC
    sends, None: as the cost model's transfers; receive_bytes_per_s: that it receives, None: as much; decision_s: from a
    request's arrival until its prefill instance hears of it; batched_prefill: whether a prefill instance of one node
    takes on all that wait at once (sched/batched_prefill.py); prefix_senders: one of PREFIX_SENDERS; recheck: whether
    decoding instances judge TBT again as KVCache arrives; rematch: whether prefill instances match a prefix again as
    its prefill starts; without: those of PARTS that are left out; single_steps: an event for each decoding step; cores:
    of the one machine that all instances share (one_machine.py), None: each has its own; prefill_cores and step_cores:
    how many of them a prefill and a decoding step keep busy alone. The others are as in the cluster of ranks
    (cluster/config.py).
    """

    bytes_per_token: int
    layers: int
    prefill: int = 8
    stages: int = 1
    decode: int = 8
    coupled: int = 0
    coupled_mode: str = "plain"
    token_budget: int | None = None
    drop_over: int | None = None
    prefill_chunk: int = 8192
    block_size: int = 512
    dram_bytes: int = 937_500 << 20
    ssd_bytes: int = 0
    eviction: str = "lru"
    device_kv_tokens: int = 1_300_000
    max_batch: int = 256
    link_bytes_per_s: float | None = None
    receive_bytes_per_s: float | None = None
    decision_s: float = 0.0
    policy: str = "kvcache-centric"
    kvcache_balancing_threshold: float = 2.0
    admission: str = "slo"
    decoding_time_s: float | None = None
    seed: int = 0
    request_timeout: float = math.inf
    ttft_slo: float = math.inf
    tbt_slo: float = math.inf
    elastic_roles: bool = False
    elastic_after_s: float = 30.0
    inline_prefill: bool = False
    batched_prefill: bool = False
    prefix_senders: str = PREFIX_SENDERS[0]
    recheck: bool = True
    rematch: bool = True
    without: frozenset[str] = frozenset()
    single_steps: bool = False
    cores: float | None = None
    prefill_cores: float = math.inf
    step_cores: float = math.inf

    @property
    def coupled_nodes(self) -> tuple[str, ...]:
        return tuple(f"coupled{i}" for i in range(self.coupled))

    @property
    def prefill_nodes(self) -> tuple[str, ...]:
        """Those that prefill, as Conductor sees them."""
        if self.coupled:
            return self.coupled_nodes
        return tuple(f"prefill{i}" for i in range(self.prefill))

    @property
    def decoding_nodes(self) -> tuple[str, ...]:
        """Those that decode, as Conductor sees them."""
        if self.coupled:
            return self.coupled_nodes
        return tuple(f"decode{i}" for i in range(self.decode))

    @property
    def may_decode(self) -> tuple[str, ...]:
        """All instances that can be asked to."""
        return self.decoding_nodes + (self.prefill_nodes if self.elastic_roles else ())

    @property
    def dram_blocks(self) -> int:
        """Of a prefill instance: each of its nodes keeps its own layers of every block; coupled ones lend none."""
        return self._blocks(self.dram_bytes)

    @property
    def ssd_blocks(self) -> int:
        return self._blocks(self.ssd_bytes)

    def _blocks(self, nbytes: int) -> int:
        return 0 if self.coupled else nbytes * self.stages // (self.bytes_per_token * self.block_size)

    @property
    def decoding_pages(self) -> int:
        return self.device_kv_tokens // self.block_size

    def to_json(self) -> dict[str, Any]:
        values = dataclasses.asdict(self) | {"without": sorted(self.without)}
        return {n: None if n in UNLIMITED and math.isinf(v) else v for n, v in values.items()}


def config_of(model: str, **fields: Any) -> SimulationConfig:
    """A cluster that serves one of ARCHITECTURES; what `fields` of SimulationConfig do not say is as `mooncake-jax
    simulate` has it: Conductor takes its time, and coupled instances are chosen as vLLM's are.
    """
    architecture = ARCHITECTURES[model]
    defaults: dict[str, Any] = {"decision_s": SCHEDULE_S}
    if fields.get("coupled"):
        defaults["policy"] = DEFAULT_COUPLED_POLICY
    sizes = {"bytes_per_token": architecture.kv_bytes_per_token(_DTYPE), "layers": architecture.num_layers}
    return SimulationConfig(**sizes | defaults | fields)
