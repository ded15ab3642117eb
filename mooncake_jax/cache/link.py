"""A modelled network link: what a rank sends passes at most at its rate (report 5.2, 6.1: where the network decides
whether transfers hide behind computation).

A token bucket on *parts*, which the sender has cut small. Tokens flow in only while something waits: a wire saves up
nothing in idle time, so counted from there no byte goes sooner than the rate allows. The bucket's depth serves a
sender that looks late: it may catch up on that much, and on no more.

Pure arithmetic: the time is given from outside, in seconds that never run backwards. Knows neither MPI nor what goes
first: that is departures.py's.
"""

# A piece of a buffer takes the link so long, on slow ones longer: each costs a send, a receive and polling,
# which takes cores from the computation that the transfer is to hide behind. Messages do not wait for pieces.
PIECE_S = 8e-3
LEAST_PIECE_BYTES = 1 << 16
LATE_S = 5e-3  # so long may Python's threads wait for one another (sys.getswitchinterval)


class Link:
    """gbps: 10^9 bits a second, above 0. No part may have more than `piece` bytes."""

    def __init__(self, gbps: float):
        self._bytes_per_s = gbps * 1e9 / 8
        self.piece = max(LEAST_PIECE_BYTES, int(self._bytes_per_s * PIECE_S))
        # A piece must fit, and once it does the sender may be late. 13 ms at 1 Gbps: 1.6 MB.
        self._depth_s = self.piece / self._bytes_per_s + LATE_S
        self._empty_at = 0.0  # the tokens in the bucket are what has flowed in since then

    def begin(self, now: float) -> None:
        """Something waits again: the bucket is empty."""
        self._empty_at = now

    def due(self, nbytes: int) -> float:
        """When a part of so many bytes may go, if it is the next."""
        return self._empty_at + nbytes / self._bytes_per_s

    def take(self, now: float, nbytes: int) -> None:
        """A part goes, which was due."""
        self._empty_at = max(self._empty_at, now - self._depth_s) + nbytes / self._bytes_per_s
