"""Mailbox: what other threads and signal handlers hand to one thread, which waits for it with a deadline.

In place of queue.SimpleQueue, whose get(timeout=...) in CPython 3.11 and 3.12 now and then waits for ever: a put whose
item was taken without waiting leaves the queue's lock open, and if the deadline has passed when the next get has
taken that lock, the time left is below zero, which means without limit. And of queue.Queue, which a signal handler must
not touch while its own thread does.
"""

import threading
import time
from collections import deque
from typing import Any


class Mailbox:
    """put() from any thread or signal handler, get() from one thread."""

    def __init__(self):
        self._items: deque = deque()
        self._told = threading.Lock()  # open once something has come since the taker last waited
        self._told.acquire()

    def put(self, item: Any) -> None:
        self._items.append(item)
        try:
            self._told.release()
        except RuntimeError:
            pass  # open already

    @property
    def empty(self) -> bool:
        return not self._items

    def get(self, timeout: float = 0.0) -> Any | None:
        """The next item, or None if none has come after so many seconds."""
        deadline = time.monotonic() + timeout
        while not self._items:
            left = deadline - time.monotonic()
            if left <= 0 or not self._told.acquire(timeout=left):
                break
        return self._items.popleft() if self._items else None
