"""Pace: how many times longer things take than the cost model says, learned from what really happened.

Without it an estimate that is wrong by a factor stays wrong by it, and T_queue (report 6.1) adds the errors of
everything that waits.
"""

from dataclasses import dataclass

MEMORY = 0.9  # the weight of what was known when something new is learned
MOST = 8.0  # one that hung says no more than this, or its instance would be avoided for ever


@dataclass(slots=True)
class Pace:
    """factor: actual over estimated seconds, of the last ten or so. Long ones weigh more: it is seconds that add up.

    The first estimate counts once as if it had come true.
    """

    factor: float = 1.0
    _actual: float = 0.0
    _estimated: float = 0.0

    def learn(self, estimated: float, actual: float) -> None:
        """An estimate, as the cost model makes it, and what it came to, both in seconds."""
        if not estimated > 0:
            return
        if not self._estimated:
            self._actual = self._estimated = estimated
        self._actual = MEMORY * self._actual + min(max(actual, estimated / MOST), estimated * MOST)
        self._estimated = MEMORY * self._estimated + estimated
        self.factor = self._actual / self._estimated
