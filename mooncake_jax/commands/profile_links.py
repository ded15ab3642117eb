"""The two ends of what `mooncake-jax profile` sends: rank 0's links, and rank 1, which takes KVCache in as a decoding
instance does and keeps none of it.
"""

import platform
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from mooncake_jax.cache.layout import BlockLayout
from mooncake_jax.cache.messenger import Messenger
from mooncake_jax.cache.transport import Transport
from mooncake_jax.cluster.control import KVCacheSent, KVPiece, Stop


@dataclass(frozen=True, slots=True)
class CpuAsked:
    """How many CPU seconds has rank 1 used on this host? Answered by CpuUsed."""

    host: str


@dataclass(frozen=True, slots=True)
class CpuUsed:
    """0 if rank 1 is on another host."""

    seconds: float


class _End:
    """What either rank's messenger calls; by default all buffers are thrown away."""

    def place(self, source: int, header: Any) -> Sequence[np.ndarray] | None:
        return None

    def on_buffers(self, source: int, header: Any, buffers: Sequence[np.ndarray]) -> None: ...

    def on_broken(self, source: int, header: Any, reason: str) -> None: ...


class SendingEnd(_End):
    """Of rank 0."""

    def __init__(self):
        self.answers: queue.SimpleQueue[CpuUsed | None] = queue.SimpleQueue()  # None: rank 1 is gone

    def on_message(self, source: int, message: CpuUsed) -> None:
        self.answers.put(message)

    def on_lost(self, rank: int) -> None:
        self.answers.put(None)


class ReceivingEnd(_End):
    """Of rank 1. Rank 0 tells the layout of its KVCache before it sends any."""

    def __init__(self):
        self._over = threading.Event()
        self._arrivals: dict[
            int, np.ndarray
        ] = {}  # [L, 2, prompt tokens, K, D] by dispatch, as decoding hardware has it

    def serve(self, messenger: Messenger) -> None:
        """Until rank 0 sends no more."""
        self._messenger = messenger
        messenger.start()
        self._over.wait()

    def on_message(self, source: int, message: Any) -> None:
        match message:
            case BlockLayout():
                self._layout = message
            case KVCacheSent(dispatch):
                self._arrivals.pop(dispatch, None)
            case CpuAsked(host):
                self._messenger.send(source, CpuUsed(time.process_time() if host == platform.node() else 0.0))
            case Stop():
                self._over.set()

    def place(self, source: int, header: Any) -> Sequence[np.ndarray] | None:
        if not isinstance(header, KVPiece):
            return None
        if header.dispatch not in self._arrivals:
            layout = self._layout
            shape = (layout.layers, 2, header.prompt_tokens, layout.kv_heads, layout.head_dim)
            self._arrivals[header.dispatch] = np.empty(shape, layout.raw)
        kv = self._arrivals[header.dispatch][header.layer, :, header.start : header.start + header.tokens]
        return [kv[0], kv[1]]

    def on_lost(self, rank: int) -> None:
        self._over.set()


class ToRankOne:
    """Links of rank 0 to the one other node there is."""

    lent = None

    def __init__(self, messenger: Messenger, end: SendingEnd, transport: Transport):
        self._messenger, self._end, self.transport = messenger, end, transport

    def send(self, node: str, message: Any) -> Future:
        return self._messenger.send(1, message)

    def send_buffers(self, node: str, header: Any, buffers: Sequence[np.ndarray]) -> Future:
        return self._messenger.send_buffers(1, header, buffers)

    def cpu_s(self) -> float:
        """CPU seconds that both ranks have used so far, as far as they share a host. Raises ConnectionError if rank 1
        is gone.
        """
        self._messenger.send(1, CpuAsked(platform.node()))
        used = self._end.answers.get()
        if used is None:
            raise ConnectionError("rank 1 is gone")
        return time.process_time() + used.seconds
