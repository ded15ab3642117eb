"""How a transfer ends, for whoever waits for its future: once, whatever comes first."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class PeerLost(Exception):
    """The other rank of a transfer died."""

    def __init__(self, rank: int):
        super().__init__(f"rank {rank} is lost")


class Ending:
    """The future of one transfer, and when it ends at the latest (monotonic clock). Unless it was made otherwise, the
    future may be cancelled at any time.
    """

    __slots__ = ("future", "deadline", "_deadline_s", "ended")

    def __init__(self, deadline_s: float | None = None, cancellable: bool = True):
        self.future: Future = Future()
        if not cancellable:
            self.future.set_running_or_notify_cancel()
        self.deadline = None if deadline_s is None else time.monotonic() + deadline_s
        self._deadline_s = deadline_s
        self.ended = False

    @property
    def cancelled(self) -> bool:
        return self.future.cancelled()

    def on_cancel(self, call: Callable[[], None]) -> None:
        """Call this from whatever thread cancels."""
        self.future.add_done_callback(lambda future: call() if future.cancelled() else None)

    def overdue(self, now: float) -> bool:
        return self.deadline is not None and now >= self.deadline

    def timeout(self) -> TimeoutError:
        return TimeoutError(f"not transferred within {self._deadline_s:g} s")

    def end(self, error: Exception | None = None, result: Any = None) -> None:
        """Called once, also if it was cancelled: those who wait for it hear of that now."""
        self.ended = True
        if not self.future.running() and not self.future.set_running_or_notify_cancel():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)
