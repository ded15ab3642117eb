"""MFU of the prefill pool: which share of its accelerators' peak went into useful FLOPs (report 3, figure 1).

The report lets operators set a lower bound on it: the prefill pool is to reuse as much KVCache as it can, as long as
TTFT keeps its SLO and the accelerators are not left idle or fed with prompts too short for them. It does not say what
is done below that bound; here it is reported, and nobody is scheduled otherwise. Useful is what the model needs for
the tokens that were computed: neither what reuse has spared, nor padding. Knows nothing of clocks.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.sched.roofline import layer_weights, pair_flops


@dataclass(slots=True)
class PrefillWork:
    """Prefills that are done, whatever became of their requests; tokens that they computed, and pairs of such a token
    and one that it attends to.
    """

    prefills: int = 0
    tokens: int = 0
    pairs: int = 0

    def add(self, tokens: int, prefix: int) -> None:
        """One of a prompt of `tokens`, of which `prefix` were reused."""
        new = tokens - prefix
        self.prefills += 1
        self.tokens += new
        self.pairs += new * prefix + new * (new + 1) // 2

    def flops(self, model: LlamaConfig) -> int:
        """Of all layers, with causal attention; the head has one token a prefill, which is nothing."""
        return 2 * layer_weights(model) * self.tokens + pair_flops(model) * self.pairs


def prefill_mfu(
    flops: Mapping[str, float], peak_flops: Mapping[str, float], duration_s: float, floor: float | None
) -> dict[str, Any]:
    """For a run's summary, ready for JSON. flops: useful ones by instance; peak_flops: FLOPs a second that it could
    have computed; floor: the least share that the pool is to reach, None for no bound.
    """
    instances = {node: _share(flops[node], peak_flops[node], duration_s) for node in flops}
    pool = _share(math.fsum(flops.values()), math.fsum(peak_flops[node] for node in flops), duration_s)
    return {
        "pool": pool,
        "instances": instances,
        "flops": dict(flops),
        "peak_flops": {node: peak_flops[node] for node in flops},
        "floor": floor,
        "floor_met": None if floor is None or pool is None else pool >= floor,
    }


def _share(flops: float, peak_flops: float, duration_s: float) -> float | None:
    possible = peak_flops * duration_s
    return flops / possible if possible > 0 else None
