"""A run whose input has been checked: what rank 0 needs to serve it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake_jax.cluster.config import ClusterConfig
from mooncake_jax.cluster.frontend import ServingLimits
from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.model.tokenizer import Tokenizer
from mooncake_jax.request import Request
from mooncake_jax.sched.cost import CostModel


@dataclass(frozen=True)
class Plan:
    """dtype_measured: what made --dtype=auto choose; workload: the flags that chose the requests, for the record;
    cost: what Conductor believes, None to have it measured.
    """

    config: ClusterConfig
    dtype_measured: str | None
    cost: CostModel | None
    model: LlamaConfig
    fingerprint: bytes
    tokenizer: Tokenizer | None
    requests: list[Request]
    limits: ServingLimits
    out: Path
    workload: dict[str, Any]

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that will be prefilled; 0 if there is none."""
        return max((r.prompt_tokens for r in self.requests if self.limits.why_invalid(r) is None), default=0)
