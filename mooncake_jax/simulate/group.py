"""How long a prefill group takes: one node, or a pipeline of them (report 5.1 and 5.2); and what Conductor believes.

Layer-wise, loading the reused prefix and storing the new KVCache go on while other layers are computed: a prefill takes
as long as the longest of the three, and the first layer's share of loading and the last one's of storing beside.
Knows nothing of queues and blocks.
"""

import math
from collections.abc import Sequence

from mooncake_jax.sched.cost import CostModel
from mooncake_jax.simulate.config import SimulationConfig


class GroupCost:
    """The cost model of instances of which each has the hardware for itself, from that of a node: what Conductor
    believes of them. It is in the inner loop of every decision.
    """

    def __init__(self, config: SimulationConfig, node: CostModel):
        self._config, self._node = config, node
        # What a node does alone, without a call in between. Of a prompt, a decoding instance computes it inlined.
        self.prefill_compute, self.step, self.load = node.prefill_compute, node.step, node.load
        self.read_ssd, self.write_ssd = node.read_ssd, node.write_ssd
        self._bytes_per_token, self._layers = config.bytes_per_token, config.layers
        self._stages, self._chunk = config.stages, config.prefill_chunk
        self._overlaps = "overlap" not in config.without
        self._loads, self._stores = "loading" not in config.without, "storing" not in config.without

    def prefill(self, tokens: int, prefix: int) -> float:
        """Until a prompt has left the instance. Chunks that take each stage p seconds leave S stages after the sum of
        p and S - 1 times the longest.
        """
        seconds = self.on_node(tokens, prefix)
        if self._stages == 1 or tokens - prefix <= self._chunk:
            return seconds
        shares = self.shares(tokens, prefix, seconds)
        return math.fsum(shares) + (self._stages - 1) * max(shares)

    def on_node(self, tokens: int, prefix: int) -> float:
        """On a single node."""
        compute = self.prefill_compute(tokens, prefix)
        if not self._overlaps:
            return self._node.prefill(tokens, prefix) if self._loads else compute
        load = self.load(prefix * self._bytes_per_token) if prefix and self._loads else 0.0
        store = self.load((tokens - prefix) * self._bytes_per_token) if self._stores else 0.0
        return max(compute, load, store) + (load + store) / self._layers

    def shares(self, tokens: int, prefix: int, seconds: float) -> Sequence[float]:
        """Seconds that each chunk takes a stage, `seconds` of all together on one node."""
        bounds = [*range(prefix, tokens, self._chunk), tokens]
        parts = [self.prefill_compute(end, begin) for begin, end in zip(bounds, bounds[1:])]
        whole = 0.0
        for part in parts:
            whole += part
        if not whole:  # where computing costs nothing, loading and storing go by tokens
            parts, whole = [end - begin for begin, end in zip(bounds, bounds[1:])], tokens - prefix
        return [part * (seconds / whole) / self._stages for part in parts]

    def transfer(self, nbytes: int, flows: int = 1) -> float:
        """Between prefill instances: each node sends its own layers."""
        without = self._config.without
        if "network" in without:
            return 0.0
        return node_transfer(self._config, self._node, nbytes // self._stages, 1 if "sharing" in without else flows)


def node_transfer(config: SimulationConfig, cost: CostModel, nbytes: int, flows: int = 1) -> float:
    """Seconds of a transfer from one node to another, one of `flows` that leave it: at the rate of the NICs, where the
    configuration has one.
    """
    if config.link_bytes_per_s is None:
        return cost.transfer(nbytes, flows)
    return cost.transfer(0) + flows * (nbytes / config.link_bytes_per_s)


class PrefillGroup:
    """One instance. busy: seconds that each stage has been taken; computed: seconds of computation, of all together."""

    def __init__(self, config: SimulationConfig, cost: CostModel):
        self._cost = GroupCost(config, cost)
        self._free = [0.0] * config.stages  # when each stage has done all that was given to it
        self.busy = [0.0] * config.stages
        self.computed = 0.0

    def run(self, tokens: int, prefix: int, now: float) -> tuple[float, float]:
        """Take on a prefill behind what it has: when it enters, and when it is done."""
        self.computed += self._cost.prefill_compute(tokens, prefix)
        seconds = self._cost.on_node(tokens, prefix)
        begun = max(now, self._free[0])
        if len(self._free) == 1:
            self._free[0] = begun + seconds
            self.busy[0] += seconds
            return begun, self._free[0]
        done = begun
        for share in self._cost.shares(tokens, prefix, seconds):
            done = self._pass(share, now)
        return begun, done

    def _pass(self, share: float, now: float) -> float:
        """A chunk through all stages, each of which it takes for so long. Returns when it is out."""
        at = now
        for stage, free in enumerate(self._free):
            at = max(at, free) + share
            self._free[stage] = at
            self.busy[stage] += share
        return at
