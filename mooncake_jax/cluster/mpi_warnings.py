"""What mpiexec says on its standard error, without a warning that is known and answered.

Open MPI warns, whatever the kind, that windows are not tested under failures, and has no switch for it. Memory read
one-sided is checked by its reader, and a read from a dead rank has a deadline (cache/one_sided.py).
"""

import threading
from collections.abc import Iterable, Iterator
from typing import IO

KNOWN = "is not tested for post-failure"
AGAIN = "help-mpi-ft.txt / module:untested"
MOST_LINES = 40  # of a warning


def without_known_warnings(lines: Iterable[str]) -> Iterator[str]:
    """All lines as they come, but those of a warning, between two lines of dashes, only once it has ended."""
    warning: list[str] = []
    for line in lines:
        rule = line.startswith("-----")
        if warning or rule:
            warning.append(line)
            if (rule and len(warning) > 1) or len(warning) > MOST_LINES:
                yield from () if any(KNOWN in said for said in warning) else warning
                warning = []
        elif AGAIN not in line:
            yield line
    yield from warning


def pass_on(source: IO[str], target: IO[str]) -> threading.Thread:
    """Write what mpiexec says, on a thread of its own, until it ends."""

    def write() -> None:
        for line in without_known_warnings(source):
            target.write(line)
            target.flush()

    thread = threading.Thread(target=write, name="mpiexec's standard error", daemon=True)
    thread.start()
    return thread
