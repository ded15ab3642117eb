"""A modelled network link: what a rank sends passes at most at its rate, and in which order (report 5.2, 6.1: where
the network decides whether transfers hide behind computation).

A token bucket on *parts*, which the sender has cut small. Tokens flow in only while something waits: a wire saves up
nothing in idle time, so counted from there no byte goes sooner than the rate allows. The bucket's depth serves a
sender that looks late: it may catch up on that much, and on no more.

Urgent parts (messages) go before all others (buffers). The others take turns by the rank they go to, as a network card
serves its connections, and keep their order among those for one rank.

Pure arithmetic: the time is given from outside, in seconds that never run backwards. Knows neither MPI nor what parts
hold.
"""

from collections import deque
from typing import Any

PIECE_S = 1e-3  # a piece of a buffer takes the link so long,
LEAST_PIECE_BYTES = 1 << 16  # but on slow links it is this large: every piece costs a send, a receive and their polling
LATE_S = 5e-3  # so long may Python's threads wait for one another (sys.getswitchinterval)

_Part = tuple[int, int, Any]  # rank, bytes, what it is


class Link:
    """gbps: 10^9 bits a second, above 0. No part may have more than `piece` bytes."""

    def __init__(self, gbps: float):
        self._bytes_per_s = gbps * 1e9 / 8
        self.piece = max(LEAST_PIECE_BYTES, int(self._bytes_per_s * PIECE_S))
        # A piece must fit, and once it does the sender may be late. 6 ms at 1 Gbps: 750 kB.
        self._depth_s = self.piece / self._bytes_per_s + LATE_S
        self._empty_at = 0.0  # the tokens in the bucket are what has flowed in since then
        self._urgent: deque[_Part] = deque()
        self._others: dict[int, deque[_Part]] = {}  # by rank, in the order of their turns

    def put(self, now: float, rank: int, nbytes: int, part: Any, urgent: bool = False) -> None:
        """Queue a part for this rank."""
        if self._next() is None:
            self._empty_at = now
        queue = self._urgent if urgent else self._others.setdefault(rank, deque())
        queue.append((rank, nbytes, part))

    def due(self) -> float | None:
        """When the next part may go; None if none waits."""
        following = self._next()
        return None if following is None else self._empty_at + following[1] / self._bytes_per_s

    def pop(self, now: float) -> Any | None:
        """The next part, if it may go now."""
        due = self.due()
        if due is None or now < due:
            return None
        rank, nbytes, part = self._urgent.popleft() if self._urgent else self._take_turn()
        self._empty_at = max(self._empty_at, now - self._depth_s) + nbytes / self._bytes_per_s
        return part

    def drop(self, rank: int) -> None:
        """Forget what waits for this rank."""
        self._urgent = deque(part for part in self._urgent if part[0] != rank)
        self._others.pop(rank, None)

    def _next(self) -> _Part | None:
        if self._urgent:
            return self._urgent[0]
        return next(iter(self._others.values()))[0] if self._others else None

    def _take_turn(self) -> _Part:
        rank = next(iter(self._others))
        queue = self._others.pop(rank)
        part = queue.popleft()
        if queue:
            self._others[rank] = queue
        return part
