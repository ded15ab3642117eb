"""How busy others kept this machine while an experiment's own processes ran: what a measurement is worth."""

import os
import resource
import time
from pathlib import Path

_STAT = Path("/proc/stat")
_IDLE = (3, 4)  # columns behind "cpu": idle, and waiting for disks
_VIRTUAL = (8, 9)  # of virtual machines, counted elsewhere already


class OtherWork:
    """From when it is made. Processes started since then are this one's own once they have been waited for."""

    def __init__(self):
        self._at, self._busy, self._own = time.monotonic(), _busy_s(), _own_s()

    def cores(self) -> float | None:
        """How many cores on average, those included that a hypervisor gave to other machines; None where the system
        does not tell.
        """
        busy = _busy_s()
        if busy is None:
            return None
        return max(busy - self._busy - (_own_s() - self._own), 0.0) / (time.monotonic() - self._at)


def _busy_s() -> float | None:
    """Seconds that all cores have been busy since the machine began."""
    if not _STAT.exists():
        return None
    ticks = [int(column) for column in _STAT.read_text().splitlines()[0].split()[1:]]
    rest = set(_IDLE) | set(_VIRTUAL)
    return sum(count for column, count in enumerate(ticks) if column not in rest) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """CPU seconds of this process, and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
