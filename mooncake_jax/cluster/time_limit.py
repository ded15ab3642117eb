"""The time that a decision of Conductor's may take, by the machine's clock.

On a rank's main thread only: it is an alarm, which ends a policy that never returns too. MPI's own start and end are
under alarms of their own, at other times.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from mooncake_jax.sched.scheduler import MOST_SECONDS, TooLong


@contextmanager
def decision_time(seconds: float = MOST_SECONDS) -> Iterator[None]:
    """Raises TooLong inside after so many seconds."""

    def ring(*_):
        raise TooLong

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            signal.signal(signal.SIGALRM, before)
