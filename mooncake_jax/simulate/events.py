"""Virtual time: what happens when, in an order that is the same in every run.

Events at one time happen in the order they were asked for, after them those that were asked for as the last ones. Knows
nothing of what they are.
"""

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any

from mooncake_jax.errors import UsageError
from mooncake_jax.sched.messages import Message

_LAST = 1 << 60  # more than events are ever asked for

# Of the simulated hardware itself: called with the value it was asked for with, and the time.
Happening = Callable[[Any, float], None]


class Events:
    """now: the time of the latest event. soon: messages to be handled at that time, before anything else happens.

    Nothing can happen before now: UsageError tells that a cost is to blame, since only costs say how long things take.
    """

    __slots__ = ("_asked", "_heap", "now", "soon")

    def __init__(self):
        self.now = 0.0
        self.soon: deque[tuple[str, Message]] = deque()
        self._heap: list[tuple[float, int, str | None, Any]] = []
        self._asked = 0

    def post(self, when: float, node: str, message: Message) -> None:
        """This node is to handle this message then."""
        if not when >= self.now:  # nor is it a number
            raise self._in_the_past(when)
        self._asked += 1
        heapq.heappush(self._heap, (when, self._asked, node, message))

    def at(self, when: float, happening: Happening, value: Any) -> None:
        if not when >= self.now:
            raise self._in_the_past(when)
        self._asked += 1
        heapq.heappush(self._heap, (when, self._asked, None, (happening, value)))

    def at_last(self, when: float, happening: Happening, value: Any) -> None:
        """Once all else that happens at that time has happened."""
        if not when >= self.now:
            raise self._in_the_past(when)
        self._asked += 1
        heapq.heappush(self._heap, (when, _LAST + self._asked, None, (happening, value)))

    def _in_the_past(self, when: float) -> UsageError:
        return UsageError(
            f"--cost: something that begins at {self.now:.6g} s would end at {when:.6g} s: the cost is negative for "
            "what this run asks of it; measure or fit it again for such lengths"
        )

    @property
    def over(self) -> bool:
        """Whether nothing is to happen any more."""
        return not self._heap and not self.soon

    def advance(self) -> tuple[str, Message] | None:
        """To the next message, with its node; what the hardware does until then has happened. None if nothing is left,
        or if there is something in `soon`.
        """
        while self._heap and not self.soon:
            self.now, _, node, what = heapq.heappop(self._heap)
            if node is not None:
                return node, what
            what[0](what[1], self.now)
        return None
