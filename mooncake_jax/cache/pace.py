"""How long the messenger's thread rests between two looks at MPI, which offers nothing to wait on.

Not at all while looks find something; else longer the longer they find nothing, so that no core is spent on looking and
idling costs little. Resting gives Python's interpreter lock to other threads within microseconds, which only lending it
for moments would not.
"""

import ctypes
import sys
import time

SHORTEST_S = 15e-6
SOON_S = 1e-3  # an answer comes within it, or not at once
LONGEST_S, GROWTH = 2e-3, 2.0


class Pace:
    """Made on the thread that rests."""

    def __init__(self):
        _sleep_precisely()
        self._soon_until, self._next_s = 0.0, SHORTEST_S

    def rest_s(self, moved: bool, soon: bool) -> float:
        """Seconds to rest after a look that moved something or not. soon: what moved lets expect more at once."""
        now = time.monotonic()
        if soon:
            self._soon_until = now + SOON_S
        if moved:
            self._next_s = SHORTEST_S
            return 0.0
        if now < self._soon_until:
            return SHORTEST_S
        rest, self._next_s = self._next_s, min(self._next_s * GROWTH, LONGEST_S)
        return rest


def _sleep_precisely() -> None:
    """Linux lets a thread's sleeps last 50 us longer than asked unless it says otherwise."""
    if sys.platform == "linux":
        set_timer_slack, nanoseconds = 29, 1000  # PR_SET_TIMERSLACK
        ctypes.CDLL(None).prctl(set_timer_slack, nanoseconds, 0, 0, 0)
