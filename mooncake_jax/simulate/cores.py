"""The cores of one machine that all instances share: what computes at once slows one another down.

A computation alone keeps so many cores busy; with others it gets a max-min fair share of them, as the operating system
gives it, and takes so much longer. Knows nothing of what is computed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from mooncake_jax.simulate.events import Events

Done = Callable[[float], None]  # called with the time


@dataclass(slots=True, eq=False)
class _Computation:
    """left: seconds alone that it still took at `since`; speed: of those a second since then."""

    left: float
    wanted: float
    done: Done
    since: float
    speed: float = 0.0
    estimate: int = 0  # how often its end was foretold


@dataclass(slots=True)
class Cores:
    """count: of the machine. busy: core seconds that were used so far."""

    events: Events
    count: float
    busy: float = 0.0
    _running: list[_Computation] = field(default_factory=list)

    def run(self, seconds: float, wanted: float, now: float, done: Done) -> None:
        """Compute what takes so many seconds alone, and keeps `wanted` cores busy meanwhile, if there are so many."""
        self.busy += seconds * min(wanted, self.count)
        self._running.append(_Computation(seconds, min(wanted, self.count), done, now))
        self._share(now)

    def _share(self, now: float) -> None:
        shares = fair_shares([computation.wanted for computation in self._running], self.count)
        for computation, share in zip(self._running, shares):
            speed = share / computation.wanted
            if speed == computation.speed:
                continue
            computation.left -= computation.speed * (now - computation.since)
            computation.since, computation.speed = now, speed
            computation.estimate += 1
            end = now + max(computation.left, 0.0) / speed
            self.events.at(end, self._end, (computation, computation.estimate))

    def _end(self, foretold: tuple[_Computation, int], now: float) -> None:
        computation, estimate = foretold
        if estimate != computation.estimate:  # its speed has changed since
            return
        self._running.remove(computation)
        self._share(now)
        computation.done(now)

    @property
    def idle(self) -> bool:
        return not self._running

    def check(self) -> None:
        """Assert the invariants: no more cores are used than there are, and none rests that somebody wants."""
        used = sum(computation.speed * computation.wanted for computation in self._running)
        assert used <= self.count * (1 + 1e-9), f"{used} of {self.count} cores are in use"
        wanted = sum(computation.wanted for computation in self._running)
        assert used >= min(wanted, self.count) * (1 - 1e-9), f"{used} cores are in use, {wanted} are wanted"


def fair_shares(wanted: list[float], count: float) -> list[float]:
    """Max-min fair cores of each: none gets more than it wants, and what one leaves the others share."""
    shares, room = [0.0] * len(wanted), count
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    for place, which in enumerate(order):
        shares[which] = min(wanted[which], room / (len(order) - place))
        room -= shares[which]
    return shares
