"""The time that each of Conductor's decisions may take, by the machine's clock; on ranks and in a simulation.

On the main thread only: it is an alarm, which ends a policy that never returns too. MPI's own start and end are under
alarms of their own, at other times.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mooncake_jax.sched.scheduler import MOST_SECONDS, NotTheUsers, TooLong

AGAIN_S = 0.01  # between alarms of a decision that goes on all the same


class _TimeLimit:
    """Entered for every decision. Raises TooLong inside once it has lasted so long, again and again until it ends: a
    bare `except` swallows one, but is left sooner or later; and at its end if no alarm has come through. A
    KeyboardInterrupt goes on if Ctrl-C was typed, even one that was swallowed; else it is the policy's own.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._begun: float | None = None  # None: no decision is under way
        self._interrupted = False

    def __enter__(self) -> None:
        self._begun = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, self._seconds, AGAIN_S)

    def __exit__(self, kind: type | None, *_) -> None:
        begun, self._begun = self._begun, None
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self._interrupted:
            raise KeyboardInterrupt
        if time.monotonic() - begun >= self._seconds:
            raise TooLong
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            raise NotTheUsers

    def ring(self, _, frame) -> None:
        begun = self._begun
        if begun is None or frame.f_code in _OWN:  # nobody is left, or about to be left, to break off
            return
        if time.monotonic() - begun >= self._seconds:
            raise TooLong

    def interrupt(self, *_) -> None:
        self._interrupted = True
        raise KeyboardInterrupt


_OWN = (_TimeLimit.__enter__.__code__, _TimeLimit.__exit__.__code__)


@contextmanager
def decision_time(seconds: float = MOST_SECONDS) -> Iterator[_TimeLimit]:
    """A time limit for the decisions of one run, which is over at the end. Ranks handle SIGINT themselves."""
    limit = _TimeLimit(seconds)
    handlers = {signal.SIGALRM: limit.ring}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        handlers[signal.SIGINT] = limit.interrupt
    before = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
    try:
        yield limit
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
