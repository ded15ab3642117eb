"""How long a prefill group takes: one node, or a pipeline of them (report 5.1 and 5.2).

Layer-wise, loading the reused prefix and storing the new KVCache go on while other layers are computed: a prefill takes
as long as the longest of the three, and the first layer's share of loading and the last one's of storing beside.
Knows nothing of queues and blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_jax.sched.cost import CostModel
from mooncake_jax.simulate.config import SimulationConfig


@dataclass(frozen=True, slots=True)
class GroupCost:
    """A cost model of one node as one of a pipeline of `stages`, which each compute their share of a chunk's layers: a
    prefill of n chunks takes n + stages - 1 of those shares.
    """

    node: CostModel
    stages: int
    prefill_chunk: int

    def prefill(self, tokens: int, prefix: int) -> float:
        return self.node.prefill(tokens, prefix) * self._share(tokens - prefix)

    def prefill_compute(self, tokens: int, prefix: int) -> float:
        return self.node.prefill_compute(tokens, prefix) * self._share(tokens - prefix)

    def _share(self, computed: int) -> float:
        chunks = max(1, -(-computed // self.prefill_chunk))
        return (chunks + self.stages - 1) / (chunks * self.stages)

    def step(self, batch: int, context: int) -> float:
        return self.node.step(batch, context)

    def transfer(self, nbytes: int, flows: int = 1) -> float:
        return self.node.transfer(nbytes, flows)

    def load(self, nbytes: int) -> float:
        return self.node.load(nbytes)

    def read_ssd(self, nbytes: int) -> float:
        return self.node.read_ssd(nbytes)

    def write_ssd(self, nbytes: int) -> float:
        return self.node.write_ssd(nbytes)


class PrefillGroup:
    """One instance. busy: seconds that each stage has been taken; computed: seconds of computation, of all together."""

    def __init__(self, config: SimulationConfig, cost: CostModel):
        self._config, self._cost = config, cost
        self._free = [0.0] * config.stages  # when each stage has done all that was given to it
        self.busy = [0.0] * config.stages
        self.computed = 0.0

    def seconds(self, tokens: int, prefix: int) -> float:
        """On a single node that is free."""
        config, cost = self._config, self._cost
        compute = cost.prefill_compute(tokens, prefix)
        if "overlap" in config.without:
            return compute if "loading" in config.without else cost.prefill(tokens, prefix)
        load = cost.load(prefix * config.bytes_per_token) if prefix and "loading" not in config.without else 0.0
        new = tokens - prefix
        store = cost.load(new * config.bytes_per_token) if "storing" not in config.without else 0.0
        return max(compute, load, store) + (load + store) / config.layers

    def run(self, tokens: int, prefix: int, now: float) -> tuple[float, float]:
        """Take on a prefill behind what it has: when it enters, and when it is done."""
        self.computed += self._cost.prefill_compute(tokens, prefix)
        seconds = self.seconds(tokens, prefix)
        if self._config.stages == 1:
            begun = max(now, self._free[0])
            self._free[0] = begun + seconds
            self.busy[0] += seconds
            return begun, self._free[0]
        begun = done = max(now, self._free[0])
        for share in self._shares(tokens, prefix, seconds):
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

    def _shares(self, tokens: int, prefix: int, seconds: float) -> Sequence[float]:
        """Seconds that each chunk takes a stage, `seconds` of all together on one node."""
        bounds = [*range(prefix, tokens, self._config.prefill_chunk), tokens]
        parts = [self._cost.prefill_compute(end, begin) for begin, end in zip(bounds, bounds[1:])]
        whole = 0.0
        for part in parts:
            whole += part
        return [part * (seconds / whole) / self._config.stages for part in parts]
