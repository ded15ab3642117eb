"""A later stage of a prefill instance: it does what the first stage's rank says, and has no actor of its own."""

import queue
from collections.abc import Iterator
from typing import Any

from mooncake_jax.cluster.control import EmptyTick, EnterPrompt
from mooncake_jax.cluster.entrance import Order
from mooncake_jax.cluster.prefill_stage import PrefillStage


class FollowingStage(PrefillStage):
    """The hardware of its rank. Computes from the start on."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self.start(self._told)

    def _told(self) -> Iterator[Order]:
        while True:
            yield self._orders.get()

    def on_control(self, source: int, message: Any) -> bool:
        if isinstance(message, EnterPrompt | EmptyTick):
            self._orders.put(message)
            return True
        return super().on_control(source, message)
