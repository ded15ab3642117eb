"""Progress of a command's long work, on stderr: a bar with the time left, or a line now and then without a terminal."""

import sys
import time

from rich import progress as bars
from rich.console import Console

_LINE_INTERVAL_S = 10


class WorkProgress:
    """A context manager. doing, done: the work in one word, as in "reading" and "read"."""

    def __init__(self, doing: str, done: str):
        console = Console(stderr=True)
        columns = (bars.BarColumn(), bars.TaskProgressColumn(), bars.TimeElapsedColumn(), bars.TimeRemainingColumn())
        self._bar = bars.Progress(doing, *columns, console=console) if console.is_terminal else None
        self._word = done

    def __enter__(self) -> "WorkProgress":
        self._started = self._last_line = time.monotonic()
        if self._bar:
            self._bar.start()
            self._task = self._bar.add_task("")
        return self

    def update(self, done: int, total: int) -> None:
        """So much is done, of how much; in any unit."""
        if self._bar:
            self._bar.update(self._task, completed=done, total=total)
            return
        now = time.monotonic()
        if done and now - self._last_line >= _LINE_INTERVAL_S:
            self._last_line, elapsed = now, now - self._started
            left = elapsed / done * (total - done)
            print(f"{done / total:.0%} {self._word} in {elapsed:.0f} s, about {left:.0f} s left", file=sys.stderr)

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.stop()
