"""PrefillQueue: Conductor's belief of what a prefill instance has to do (T_queue of report 6.1).

In a pipeline of S stages a prefill of n chunks takes n + S - 1 ticks, but the next one follows it into the entrance
after n (report 5.1). T_queue is the time until the entrance is free, so only those n ticks count: adding the latencies
of prefills that overlap would tell too much. What really happened corrects it twice: an instance's pace scales every
estimate, and each end shows where those that still run must be.

Knows nothing of clocks: `now` is seconds on the common clock. Estimates are seconds as the cost model gives them, for a
prefill that has the instance to itself.
"""

import math

from mooncake_jax.records import record
from mooncake_jax.sched.pace import Pace


@record
class _Prefill:
    latency: float  # seconds, by the cost model
    occupancy: float  # of these, how long the entrance is taken
    begun: float = math.inf

    @property
    def drain(self) -> float:
        return self.latency - self.occupancy


class PrefillQueue:
    """stages of the instance's pipeline; prefill_chunk: tokens that enter it at once, None for whole prompts. pace: how
    many times longer a prefill takes here than the cost model says.
    """

    __slots__ = ("_departed", "_entrance_free", "_prefill_chunk", "_running", "_stages", "_waiting", "_work", "pace")

    def __init__(self, stages: int = 1, prefill_chunk: int | None = None):
        self._stages, self._prefill_chunk = stages, prefill_chunk
        self.pace = Pace()
        self._waiting: dict[int, _Prefill] = {}  # by dispatch number
        self._running: dict[int, _Prefill] = {}  # in the order they began
        self._departed = -math.inf  # when the last one ended
        self._entrance_free = -math.inf  # once those that run have entered
        self._work = 0.0  # seconds that those that wait will take the entrance

    def __len__(self) -> int:
        """Prefills dispatched here that have not ended."""
        return len(self._waiting) + len(self._running)

    def seconds(self, now: float) -> float:
        """T_queue: seconds until a prefill that is dispatched now can begin."""
        left = self._entrance_free - now
        return self._work + left if left > 0.0 else self._work

    # --- what happens, in this order for each dispatch

    def add(self, dispatch: int, computed_tokens: int, latency: float) -> None:
        """A prefill is dispatched here, which the cost model says takes `latency` seconds."""
        self._waiting[dispatch] = _Prefill(latency, self._occupancy(computed_tokens, latency))
        self._estimate()

    def begin(self, dispatch: int, computed_tokens: int, latency: float, now: float) -> None:
        """It begins, with a new estimate: what is reused is known now. Ignored unless it waits here."""
        if self._waiting.pop(dispatch, None) is None:
            return
        self._running[dispatch] = _Prefill(latency, self._occupancy(computed_tokens, latency), now)
        self._estimate()

    def end(self, dispatch: int, now: float) -> None:
        """It is done, and teaches how long prefills take here."""
        prefill = self._running.get(dispatch)
        if prefill is not None:
            self.pace.learn(prefill.latency, now - self._entered(prefill, self._departed))
            self._departed = now
        self.drop(dispatch)

    def drop(self, dispatch: int) -> None:
        """It has failed or was cancelled: nothing is learned."""
        self._waiting.pop(dispatch, None)
        self._running.pop(dispatch, None)
        self._estimate()

    # --- estimates

    def _occupancy(self, computed_tokens: int, latency: float) -> float:
        if self._stages == 1:
            return latency
        chunks = 1 if self._prefill_chunk is None else max(1, -(-computed_tokens // self._prefill_chunk))
        return latency * chunks / (chunks + self._stages - 1)

    def _entered(self, prefill: _Prefill, departed: float) -> float:
        """When it entered, if the one before it has left the pipeline at `departed`."""
        return max(prefill.begun, departed - self.pace.factor * prefill.drain)

    def _estimate(self) -> None:
        pace, free = self.pace.factor, -math.inf
        for prefill in self._running.values():
            entered = max(self._entered(prefill, self._departed), free)
            free = entered + pace * prefill.occupancy
        self._entrance_free = free
        self._work = pace * math.fsum([prefill.occupancy for prefill in self._waiting.values()])

    def check(self) -> None:
        """Assert the invariants."""
        assert self._waiting.keys().isdisjoint(self._running), "a prefill both waits and runs"
        assert self._work >= 0.0 and self.pace.factor > 0.0, f"{self._work} s of work at a pace of {self.pace.factor}"
        assert all(0.0 <= p.occupancy <= p.latency for p in (*self._waiting.values(), *self._running.values()))
