"""Who sends a decoding instance the KVCache of a reused prefix (--prefix_senders).

`prefill`: the prefill instance, which has loaded it. `any`: whichever node of the cluster has it in its DRAM, where all
nodes lend memory to the pool and a prefix may lie on any of them; which one is drawn for each dispatch, since the pool
of a simulated cluster knows the prefill nodes alone. New KVCache comes from the prefill instance in either case.
"""

from collections.abc import Callable

from mooncake_jax.sched.splitmix import STEP, mixed
from mooncake_jax.simulate.config import SimulationConfig


class PrefixSenders:
    def __init__(self, config: SimulationConfig):
        self._seed, self._any = config.seed, config.prefix_senders == "any"
        self._nodes = (*config.prefill_nodes, *config.decoding_nodes)

    def sender(self, dispatch: int, decoding: str) -> str | None:
        """The node that sends the prefix of a dispatch to this decoding instance; None: as all else is sent."""
        if not self._any:
            return None
        others = [node for node in self._nodes if node != decoding]
        return others[mixed(self._seed + dispatch * STEP) % len(others)]


class Both:
    """Tells when both of two transfers have arrived."""

    def __init__(self, arrived: Callable[[float], None]):
        self._arrived, self._missing = arrived, 2

    def __call__(self, now: float) -> None:
        self._missing -= 1
        if not self._missing:
            self._arrived(now)
