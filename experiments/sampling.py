"""What a Conductor believes of its cluster, looked at again and again while it runs: for a host of simulate()."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from mooncake_jax.sched.actions import Action
from mooncake_jax.sched.messages import Message
from mooncake_jax.sched.view import ClusterView

T = TypeVar("T")


class Sampled(Generic[T]):
    """A Conductor whose view is looked at every so many seconds of its own clock, from 0 on, before it handles what
    comes next. look: what to keep of the view at that time.
    """

    def __init__(self, conductor: Any, every_s: float, look: Callable[[ClusterView, float], T]):
        self._conductor, self._every_s, self._look = conductor, every_s, look
        self.samples: list[T] = []

    def handle(self, message: Message, now: float) -> list[Action]:
        while (due := self._every_s * len(self.samples)) <= now:
            self.samples.append(self._look(self._conductor.view, due))
        return self._conductor.handle(message, now)
