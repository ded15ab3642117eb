"""The runs of a sweep, so many at a time, each a process of its own with a file of its own.

A run that has its file is not run again, unless it failed or the file lacks a figure of the table: that the code has
changed meanwhile is not noticed. A run ends with its sweep, even a killed one: the other end of its standard input is
held here and nowhere else. What comes of a run does not depend on which others run beside it. Knows nothing of why
which run comes next: a Search says so, told how the one before has ended.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mooncake_jax.commands.sweep_file import Flags
from mooncake_jax.commands.sweep_run import failed, write_result
from mooncake_jax.commands.sweep_table import has_figures

_LOOK_S = 0.05  # between two looks at what has ended
_END_S = 5.0  # for a process to end once asked to


@dataclass(frozen=True, slots=True)
class Order:
    """A run: the name of its file, and all flags of simulate that it has."""

    name: str
    flags: Flags


@dataclass(frozen=True, slots=True)
class Result:
    """summary as simulate writes it, None if the run failed, for this reason."""

    summary: dict[str, Any] | None
    reason: str | None


# Yields orders one after another, and is sent the result of each.
Search = Generator[Order, Result, None]


@dataclass(slots=True)
class _Running:
    process: subprocess.Popen
    search: Search
    order: Order
    errors: IO[bytes]

    def close(self) -> None:
        self.process.stdin.close()
        self.errors.close()


class Runs:
    """folder: where the files are. progress: told how many runs of this process have ended, and of how many."""

    def __init__(self, folder: Path, jobs: int, progress: Callable[[int, int], None]):
        self._folder, self._jobs, self._progress = folder, jobs, progress
        self._running: list[_Running] = []
        self._left: dict[Search, int] = {}
        self._done = 0

    def run(self, searches: Iterable[tuple[Search, int]]) -> None:
        """All of these, each with how many runs it takes at most. Whatever interrupts it ends the processes."""
        self._left = dict(searches)
        started = [(search, self._missing(search, next(search))) for search in list(self._left)]
        waiting = deque([(search, order) for search, order in started if order is not None])
        try:
            while waiting or self._running:
                while waiting and len(self._running) < self._jobs:
                    self._start(*waiting.popleft())
                self._progress(self._done, self._done + sum(self._left.values()))
                time.sleep(_LOOK_S)
                self._look()
        finally:
            self._stop()

    def _missing(self, search: Search, order: Order | None) -> Order | None:
        """The first of its runs, from this one on, that is still to be made."""
        while order is not None and (result := self._stored(order)) is not None:
            order = self._tell(search, result)
        return order

    def _tell(self, search: Search, result: Result) -> Order | None:
        """What comes next, None if nothing."""
        self._left[search] = max(self._left[search] - 1, 1)
        try:
            return search.send(result)
        except StopIteration:
            del self._left[search]
            return None

    def _start(self, search: Search, order: Order) -> None:
        self._file(order).unlink(missing_ok=True)  # of a failure before
        errors = tempfile.TemporaryFile()
        arguments = [f"--{name}={value}" for name, value in order.flags.items()]
        module = "mooncake_jax.commands.sweep_run"
        command = [sys.executable, "-m", module, str(self._file(order)), *arguments]
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": errors}
        self._running.append(_Running(subprocess.Popen(command, **streams), search, order, errors))

    def _look(self) -> None:
        """Go on with what follows those that have ended."""
        for running in [running for running in self._running if running.process.poll() is not None]:
            self._running.remove(running)
            self._done += 1
            result = self._stored(running.order, failures=True) or self._died(running)
            running.close()
            order = self._missing(running.search, self._tell(running.search, result))
            if order is not None:
                self._start(running.search, order)

    def _died(self, running: _Running) -> Result:
        """It left no file."""
        code = running.process.returncode
        running.errors.seek(0)
        told = running.errors.read().decode(errors="replace").strip().splitlines()
        reason = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        if told:
            reason += f": {' '.join(told[-1].split())}"
        write_result(self._file(running.order), failed(reason))
        return Result(None, reason)

    def _stored(self, order: Order, failures: bool = False) -> Result | None:
        """What its file says; None if there is none, if it lacks figures, or if it says that the run failed and these
        are not asked for.
        """
        try:
            fields = json.loads(self._file(order).read_bytes())
            result = Result(fields["summary"], fields["reason"])
        except (OSError, ValueError, LookupError, TypeError):
            return None
        if result.reason is not None:
            return result if failures else None
        return result if has_figures(result.summary) else None

    def _file(self, order: Order) -> Path:
        return self._folder / f"{order.name}.json"

    def _stop(self) -> None:
        """What has ended by then counts."""
        for running in self._running:
            running.process.terminate()
        for running in self._running:
            try:
                running.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                running.process.kill()
                running.process.wait()
            running.close()
            if (result := self._stored(running.order)) is not None:
                self._tell(running.search, result)
