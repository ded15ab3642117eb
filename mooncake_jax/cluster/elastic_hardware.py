"""The hardware of an instance that prefills or decodes: both engines on the same weights (sched/elastic_instance.py).

Whatever comes goes to the hardware of the kind of work that it is for. Neither knows of the other.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mooncake_jax.cluster.control import KVPiece
from mooncake_jax.cluster.decoding_hardware import DecodingHardware
from mooncake_jax.cluster.prefill_hardware import PrefillHardware
from mooncake_jax.sched.actions import Action, DropKVCache, InlinePrefill, LoadKVCache, RunStep


class ElasticHardware:
    def __init__(self, prefill: PrefillHardware, decoding: DecodingHardware):
        self._prefill, self._decoding = prefill, decoding

    def perform(self, action: Action) -> None:
        decodes = isinstance(action, LoadKVCache | InlinePrefill | RunStep | DropKVCache)
        (self._decoding if decodes else self._prefill).perform(action)

    def close(self, deadline_s: float) -> None:
        self._decoding.close(deadline_s)
        self._prefill.close(deadline_s)

    # --- called on the messenger's thread

    def on_control(self, source: int, message: Any) -> bool:
        return self._decoding.on_control(source, message) or self._prefill.on_control(source, message)

    def place(self, source: int, header: Any) -> Sequence[np.ndarray] | None:
        return self._of(header).place(source, header)

    def on_buffers(self, source: int, header: Any, buffers: Sequence[np.ndarray]) -> None:
        self._of(header).on_buffers(source, header, buffers)

    def _of(self, header: Any) -> PrefillHardware | DecodingHardware:
        return self._decoding if isinstance(header, KVPiece) else self._prefill
