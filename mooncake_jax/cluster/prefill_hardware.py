"""The hardware of a prefill instance: engine, block store, and the ways of its KVCache (report 3, steps 1 to 3).

One prefill at a time; exports and copies go on beside it. Whatever fails ends the request at hand, never the instance.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from mooncake_jax.cache.messenger import PeerLost
from mooncake_jax.cache.store import BlockStore
from mooncake_jax.cluster.control import BlocksLayer, CopyFailed, KVCacheSent
from mooncake_jax.cluster.copies import BlockCopies
from mooncake_jax.cluster.export import Export
from mooncake_jax.cluster.links import Links
from mooncake_jax.parallel.prefill import PrefillEngine
from mooncake_jax.sched.messages import (
    AbandonCopy,
    Action,
    CopyBlocks,
    Message,
    PrefillDone,
    PrefillFailed,
    PrefillStarted,
    RunPrefill,
)


class PrefillHardware:
    def __init__(
        self, node: str, engine: PrefillEngine, store: BlockStore, links: Links, post: Callable[[Message], None]
    ):
        self.node, self._engine, self._store, self._links, self._post = node, engine, store, links, post
        self._copies = BlockCopies(node, store, links, post)
        self._prefill_thread = ThreadPoolExecutor(1, "prefill")
        self._export_thread = ThreadPoolExecutor(1, "export")

    def perform(self, action: Action) -> None:
        match action:
            case RunPrefill():
                self._prefill_thread.submit(self._run, action)
            case CopyBlocks():
                self._copies.start(action)
            case AbandonCopy(dispatch, reason):
                self._copies.abandon(dispatch, reason)
            case _:
                raise TypeError(f"{self.node} cannot perform {type(action).__name__}")

    def _run(self, run: RunPrefill) -> None:
        try:
            self._post(self._prefill(run))
        except PeerLost:
            self._fail(run, f"{run.decoding} is lost")
        except Exception as error:
            self._fail(run, f"{type(error).__name__}: {error}")

    def _fail(self, run: RunPrefill, reason: str) -> None:
        """Conductor gives the slots away when it hears of this: nothing may write them any more."""
        wait([self._export_thread.submit(int)])
        self._post(PrefillFailed(run.dispatch, self.node, reason))

    def _prefill(self, run: RunPrefill) -> PrefillDone:
        begun, request, slots = time.monotonic(), run.request, [block.slot for block in run.blocks]
        reuse = self._store.sound(run.blocks[: run.reuse])
        reused_tokens = min(reuse * self._store.layout.tokens, request.prompt_tokens - 1)
        self._post(PrefillStarted(run.dispatch, self.node, reused_tokens))
        missing = (*range(reuse, run.reuse), *run.missing)
        self._store.claim([run.blocks[i] for i in missing])
        export = Export(run, slots, reuse, frozenset(missing), self._store, self._links, self._export_thread)
        first = self._engine.prefill(
            request.prompt_ids,
            prefix_len=reused_tokens,
            load_layer=lambda layer: export.load_layer(layer, reused_tokens, self._engine.dtype),
            on_layer=export.on_layer,
            sampling=request.sampling,
        )
        export.finish()
        self._links.send(
            run.decoding,
            KVCacheSent(run.dispatch, request, first.token, first.logprobs.limited(request.sampling.logprobs)),
        )
        stored = tuple(run.blocks[i] for i in missing)
        seconds = time.monotonic() - begun
        return PrefillDone(
            run.dispatch, self.node, reused_tokens, seconds, stored, run.blocks[reuse : run.reuse], first.top_logits
        )

    # --- called on the messenger's thread

    def on_control(self, source: int, message: Any) -> bool:
        if isinstance(message, CopyFailed):
            self._copies.abandon(message.dispatch, message.reason)
            return True
        return False

    def place(self, source: int, header: Any) -> Sequence[np.ndarray] | None:
        return self._copies.place(header) if isinstance(header, BlocksLayer) else None

    def on_buffers(self, source: int, header: BlocksLayer, buffers: Sequence[np.ndarray]) -> None:
        self._copies.on_buffers(header, buffers[0])
