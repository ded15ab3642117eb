"""The device of a simulated coupled instance (sched/coupled.py): iterations with prefill, and decoding steps.

An iteration takes as long as the computation of its parts of prompts and, where requests decode in it, what they add to
a step: what a step takes whoever is in it, to read the weights, it takes but once. While nothing is prefilled,
decoding steps follow from one another as at a decoding instance, many in one event.
"""

from mooncake_jax.sched.actions import RunIteration
from mooncake_jax.sched.cost import CostModel
from mooncake_jax.sched.coupled import COUPLED_MODES
from mooncake_jax.sched.messages import StepDone
from mooncake_jax.simulate.config import SimulationConfig
from mooncake_jax.simulate.decoding_hardware import DecodingHardware
from mooncake_jax.simulate.events import Events


class CoupledHardware(DecodingHardware):
    """computed: seconds of prefill; prefilled: tokens that it has computed the KVCache of."""

    def __init__(self, node: str, config: SimulationConfig, cost: CostModel, events: Events):
        super().__init__(node, config, cost, events)
        self.computed, self.prefilled = 0.0, 0

    def iterate(self, action: RunIteration, now: float) -> None:
        prefill, whole = 0.0, []
        for part in action.parts:
            end = part.start + part.tokens
            prefill += self._cost.prefill_compute(end, part.start)
            self.prefilled += part.tokens
            self._requests[part.dispatch] = part.request
            if end == part.request.prompt_tokens:
                whole.append(part.dispatch)
        self.computed += prefill
        seconds = prefill + self._step(action.batch, prefill)
        tokens = tuple([(dispatch, None) for dispatch in (*action.batch, *whole)])
        self._events.post(now + seconds, self.node, StepDone(tokens, seconds))

    def _held(self, batch: list[int]) -> int:
        held = super()._held(batch)
        if COUPLED_MODES[self._config.coupled_mode].reuses:  # requests with a prefix in common have it once
            keys = [key for dispatch in batch for key in self._requests[dispatch].block_keys]
            held -= (len(keys) - len(set(keys))) * self._config.block_size
        return held

    def _step(self, batch: tuple[int, ...], prefill: float) -> float:
        """Seconds that the decoding step adds to an iteration with so many of prefill; it counts as made."""
        if not batch:
            return 0.0
        seconds = self._cost.step(len(batch), self._enter(batch)) - min(prefill, self._cost.step(0, 0))
        self.busy += seconds
        self.steps += 1
        self.tokens += len(batch)
        return seconds
