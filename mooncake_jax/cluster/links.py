"""How the hardware of an instance reaches the other nodes."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np


class Links(Protocol):
    def send(self, node: str, message: Any) -> Future: ...

    def send_buffers(self, node: str, header: Any, buffers: Sequence[np.ndarray]) -> Future:
        """Buffers are contiguous and must not change until the future ends."""
