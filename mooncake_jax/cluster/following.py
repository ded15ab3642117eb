"""The hardware of a rank that holds a later stage of a prefill instance: it does what the first stage's rank says."""

import queue
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from mooncake_jax.cluster.control import EmptyTick, EnterPrompt
from mooncake_jax.cluster.entrance import Order
from mooncake_jax.cluster.prefill_stage import PrefillStage
from mooncake_jax.sched.messages import Action


class FollowingStage:
    """Has no actor: all it is asked to do comes by messages."""

    def __init__(self, stage: PrefillStage):
        self._stage = stage
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        stage.start(self._told)

    def _told(self) -> Iterator[Order]:
        while True:
            yield self._orders.get()

    def perform(self, action: Action) -> NoReturn:
        raise TypeError(f"{self._stage.node} cannot perform {type(action).__name__}")

    # --- called on the messenger's thread

    def on_control(self, source: int, message: Any) -> bool:
        if isinstance(message, EnterPrompt | EmptyTick):
            self._orders.put(message)
            return True
        return self._stage.on_control(source, message)

    def place(self, source: int, header: Any) -> Sequence[np.ndarray] | None:
        return self._stage.place(source, header)

    def on_buffers(self, source: int, header: Any, buffers: Sequence[np.ndarray]) -> None:
        self._stage.on_buffers(source, header, buffers)
