"""Layer-wise export of a prefill's KVCache (report 5.2): to the decoding instance, and into this rank's block store.

As soon as a layer of a chunk exists, it is sent and its full blocks are stored, on a thread of its own, while the
engine computes on. Each stage exports its own layers. Whether what is sent passes through host memory says the
transport (cache/transport.py); what is stored does.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Executor, Future

import numpy as np

from mooncake_jax.cache.store import BlockStore
from mooncake_jax.cache.wire import Buffer
from mooncake_jax.cluster.control import KVPiece
from mooncake_jax.cluster.links import Links
from mooncake_jax.parallel.stage import PrefillJob
from mooncake_jax.sched.actions import RunPrefill


class Export:
    """The hooks that PrefillEngine calls for one request. They never raise: other stages would wait for this one. What
    goes wrong is kept for finish().

    The request's leading `reuse` blocks are loaded, those with index in `missing` are stored. first_layer: the model's
    number of the store's first layer. job: the prefill whose hooks these are, once there is one.
    """

    job: PrefillJob | None = None

    def __init__(
        self,
        run: RunPrefill,
        reuse: int,
        missing: frozenset[int],
        store: BlockStore,
        first_layer: int,
        links: Links,
        thread: Executor,
    ):
        self.run, self._reuse, self._missing = run, reuse, missing
        self._slots = [block.slot for block in run.blocks]
        self._store, self._first_layer, self._links, self._thread = store, first_layer, links, thread
        self._failure: Exception | None = None
        self._exports: list[Future] = []
        self._sends: list[Future] = []
        self._given_up = False
        # Tokens of a block to be stored that is not full yet, by layer: chunks need not end where blocks do.
        self._partial: dict[int, np.ndarray] = {}

    def load_layer(self, layer: int, tokens: int, dtype: np.dtype) -> np.ndarray:
        """The reused prefix of this layer: [2, tokens, K, D]. It goes to the decoding instance as well."""
        try:
            kv = self._store.read(self._slots[: self._reuse], layer - self._first_layer)[:, :tokens]
        except Exception as error:
            self._failure = error
            layout = self._store.layout
            return np.zeros((2, tokens, layout.kv_heads, layout.head_dim), dtype)
        self._exports.append(self._thread.submit(self._send, layer, 0, tokens, list(kv)))
        return kv.view(dtype)

    def on_layer(self, layer: int, start: int, kv) -> None:
        """New KVCache of this layer: a jax array [2, T, K, D], perhaps still being computed: the export thread waits
        for it.
        """
        self._exports.append(self._thread.submit(self._export, layer, start, kv))

    def finish(self, deadline_s: float) -> None:
        """Wait until everything is stored and sent, for so long at most. Raises what went wrong: PeerLost,
        TimeoutError; what is not sent by then is taken back.
        """
        try:
            self._wait(time.monotonic() + deadline_s)
        except BaseException:
            self._given_up = True
            for send in self._sends:
                send.cancel()
            raise

    def _wait(self, deadline: float) -> None:
        if self._failure is not None:
            raise self._failure
        for future in self._exports:
            future.result(max(deadline - time.monotonic(), 0))
        for future in self._sends:
            future.result(max(deadline - time.monotonic(), 0))

    def _export(self, layer: int, start: int, kv) -> None:
        self._send(layer, start, kv.shape[1], self._links.transport.rows(kv))
        blocks = self._touched(start, kv.shape[1])
        if not self._missing.isdisjoint(blocks):  # only what is stored need be in host memory
            self._store_blocks(layer - self._first_layer, start, np.asarray(kv).view(self._store.layout.raw))

    def _send(self, layer: int, start: int, tokens: int, rows: Sequence[Buffer]) -> None:
        header = KVPiece(self.run.dispatch, layer, start, tokens, self.run.request.prompt_tokens)
        self._sends.append(self._links.send_buffers(self.run.decoding, header, rows))
        if self._given_up:  # perhaps since finish() looked
            self._sends[-1].cancel()

    def _touched(self, start: int, tokens: int) -> range:
        """Blocks that these tokens are part of."""
        size = self._store.layout.tokens
        return range(start // size, -(-(start + tokens) // size))

    def _store_blocks(self, layer: int, start: int, kv: np.ndarray) -> None:
        """Store the blocks that this chunk completes; keep the rest for the next chunk."""
        size, partial = self._store.layout.tokens, self._partial.pop(layer, None)
        if partial is not None:
            kv, start = np.concatenate([partial, kv], axis=1), start - partial.shape[1]
        elif start % size:  # in the middle of a block that is not stored
            skipped = size - start % size
            kv, start = kv[:, skipped:], start + skipped
        first, full = start // size, kv.shape[1] // size
        if first + full in self._missing:
            self._partial[layer] = kv[:, full * size :]
        chosen = [i for i in range(first, first + full) if i in self._missing]
        if chosen:
            blocks = kv[:, : full * size].reshape(2, full, size, *kv.shape[2:]).swapaxes(0, 1)
            self._store.write([self._slots[i] for i in chosen], layer, blocks[[i - first for i in chosen]])
