"""How the hardware of an instance reaches the other nodes."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from mooncake_jax.cache.one_sided import LentMemory
from mooncake_jax.cache.transport import Transport
from mooncake_jax.cache.wire import Buffer


class Links(Protocol):
    transport: Transport  # of what leaves this rank's devices
    lent: LentMemory | None  # what ranks lend one another, if they do

    def send(self, node: str, message: Any) -> Future: ...

    def send_buffers(self, node: str, header: Any, buffers: Sequence[Buffer]) -> Future:
        """Buffers are contiguous and must not change until the future ends."""

    def can_read(self, node: str) -> bool:
        """Whether the memory that this node lends can be read without its help."""

    def read(self, node: str, offset: int, out: np.ndarray, deadline_s: float) -> Future:
        """Read what the node lends, from this byte on, if that can be read."""
