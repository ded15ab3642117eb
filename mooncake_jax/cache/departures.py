"""Which part of what a rank sends leaves next.

Messages leave before all pieces of buffers, in the order they came. Pieces leave in turns: the ranks they go to take
turns, as a network card serves its connections, and so do the transfers to one rank, so that a small one does not wait
for all of a large one. No more than a few pieces are under way to a rank at once: those are in MPI's hands, which
knows no turns. Where the link is modelled (link.py), it says when the next part may go.

Pure bookkeeping: the time is given from outside, in seconds that never run backwards. Knows neither MPI nor what parts
hold.
"""

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

from mooncake_jax.cache.link import Link

Part = tuple[int, Any]  # bytes, what it is


@dataclass(eq=False, slots=True)
class Line:
    """The pieces of one transfer that have not left, in order."""

    rank: int
    parts: deque[Part]


class Departures:
    """at_once: pieces under way to one rank."""

    def __init__(self, at_once: int):
        self._at_once = at_once
        self._link: Link | None = None
        self._messages: deque[tuple[int, int, Any]] = deque()  # rank, bytes, what
        self._lines: dict[int, deque[Line]] = {}  # by rank, both in the order of their turns; none is empty
        self._under_way: defaultdict[int, int] = defaultdict(int)

    def limit(self, link: Link) -> None:
        self._link = link

    def put_message(self, now: float, rank: int, nbytes: int, message: Any) -> None:
        self._begin(now)
        self._messages.append((rank, nbytes, message))

    def put(self, now: float, line: Line) -> None:
        """Its turn comes after those of all others to this rank."""
        self._begin(now)
        self._lines.setdefault(line.rank, deque()).append(line)

    def landed(self, now: float, rank: int) -> None:
        """One piece fewer is under way to this rank."""
        self._begin(now)
        self._under_way[rank] -= 1

    def due(self) -> float | None:
        """When the next part may go, in the past if it is free to; None if none waits or all are under way."""
        following = self._following()
        if following is None:
            return None
        return 0.0 if self._link is None else self._link.due(following[1])

    def pop(self, now: float) -> Any | None:
        """The next part, if it may go now; a piece is under way from then on."""
        following = self._following()
        if following is None:
            return None
        rank, nbytes, part = following
        if self._link is not None:
            if now < self._link.due(nbytes):
                return None
            self._link.take(now, nbytes)
        if self._messages:
            self._messages.popleft()
        else:
            self._take_turn(rank)
        return part

    def drop(self, line: Line) -> int:
        """Forget what has not left of a transfer; returns how many pieces."""
        left = len(line.parts)
        if left:
            line.parts.clear()
            self._lines[line.rank].remove(line)
            self._forget_if_empty(line.rank)
        return left

    def lose(self, rank: int) -> None:
        """Forget what waits for this rank."""
        self._messages = deque(message for message in self._messages if message[0] != rank)
        self._lines.pop(rank, None)

    def _begin(self, now: float) -> None:
        """Called before anything is added: if nothing could go until now, the link's time begins."""
        if self._link is not None and self._following() is None:
            self._link.begin(now)

    def _following(self) -> tuple[int, int, Any] | None:
        if self._messages:
            return self._messages[0]
        for rank, lines in self._lines.items():
            if self._under_way[rank] < self._at_once:
                return (rank, *lines[0].parts[0])
        return None

    def _take_turn(self, rank: int) -> None:
        lines = self._lines.pop(rank)
        line = lines.popleft()
        line.parts.popleft()
        if line.parts:
            lines.append(line)
        if lines:
            self._lines[rank] = lines
        self._under_way[rank] += 1

    def _forget_if_empty(self, rank: int) -> None:
        if not self._lines[rank]:
            del self._lines[rank]
