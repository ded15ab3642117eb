"""The entrance of an instance's pipeline: what enters in which tick (report 5.1).

The first stage decides, since its rank speaks with Conductor, and tells the others, so that all call their engines
alike. Knows nothing of models and blocks.
"""

import queue
from collections.abc import Callable, Iterator

from mooncake_jax.cluster.control import EmptyTick, EnterPrompt

Order = EnterPrompt | EmptyTick


class Entrance:
    """Prompts waiting to enter; put() may be called from any thread, orders() is for the engine's."""

    def __init__(self, stages: int, tell: Callable[[Order], None]):
        """tell: called with every order before it is given out."""
        self._stages, self._tell = stages, tell
        self._waiting: queue.SimpleQueue[EnterPrompt] = queue.SimpleQueue()

    def put(self, prompt: EnterPrompt) -> None:
        self._waiting.put(prompt)

    def orders(self) -> Iterator[Order]:
        """For ever: the next prompt or, while others are on their way and none waits, a tick in which none enters."""
        moving = 0  # ticks until the pipeline is empty
        while True:
            try:
                order, moving = self._waiting.get(block=moving == 0), self._stages - 1
            except queue.Empty:
                order, moving = EmptyTick(), moving - 1
            self._tell(order)
            yield order
