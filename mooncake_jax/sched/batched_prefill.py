"""BatchedPrefillInstance: a local scheduler that prefills all that wait together (--batched_prefill, in simulation).

Whenever the instance is free, the requests that wait and are ready enter it at once, and all of them are done when the
last one is, as in an engine that concatenates prompts. A batch takes on prompts until those that it has leave nothing
of the token budget. The paper does not say whether Mooncake's engine does so; vLLM, which it builds on, does. Prompts
of one batch reuse nothing of one another.
"""

import math

from mooncake_jax.sched.actions import Action, RunPrefillBatch
from mooncake_jax.sched.prefill import PrefillInstance


class BatchedPrefillInstance(PrefillInstance):
    """token_budget: of prompts, in tokens that are not reused, None: no limit; block_size: tokens of a block."""

    def __init__(self, name: str, token_budget: int | None, block_size: int, rematch: bool = True):
        super().__init__(name, rematch=rematch)
        self.most_running = math.inf
        self._budget = math.inf if token_budget is None else token_budget
        self._block_size = block_size

    def _start_next(self) -> list[Action]:
        if self.running:
            return []
        prefills, left = [], self._budget
        while left > 0 and (start := self._take_ready()) is not None:
            prefills.append(self._run(start))
            left -= start.request.prompt_tokens - prefills[-1].reuse * self._block_size
        return [RunPrefillBatch(tuple(prefills))] if prefills else []
