"""Layer-wise export of a prefill's KVCache (report 5.2): to the decoding instance, and into this rank's block store.

As soon as a layer of a chunk exists, it is sent and its full blocks are stored, on a thread of its own, while the
engine computes on. Each stage exports its own layers.
"""

import time
from concurrent.futures import Executor, Future

import numpy as np

from mooncake_jax.cache.store import BlockStore
from mooncake_jax.cluster.control import KVPiece
from mooncake_jax.cluster.links import Links
from mooncake_jax.parallel.stage import PrefillJob
from mooncake_jax.sched.messages import RunPrefill


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
        # Tokens of a block that is not full yet, by layer: chunks need not end where blocks do.
        self._partial: dict[int, np.ndarray] = {}
        self._next_block = [reuse] * store.layout.layers

    def load_layer(self, layer: int, tokens: int, dtype: np.dtype) -> np.ndarray:
        """The reused prefix of this layer: [2, tokens, K, D]. It goes to the decoding instance as well."""
        try:
            kv = self._store.read(self._slots[: self._reuse], layer - self._first_layer)[:, :tokens]
        except Exception as error:
            self._failure = error
            layout = self._store.layout
            return np.zeros((2, tokens, layout.kv_heads, layout.head_dim), dtype)
        self._exports.append(self._thread.submit(self._send, layer, 0, kv))
        return kv.view(dtype)

    def on_layer(self, layer: int, start: int, kv) -> None:
        """New KVCache of this layer: a jax array [2, T, K, D], perhaps still being computed: the export thread waits
        for it.
        """
        self._exports.append(self._thread.submit(self._export, layer, start, kv))

    def finish(self, deadline_s: float) -> None:
        """Wait until everything is stored and sent, for so long at most. Raises what went wrong: PeerLost,
        TimeoutError.
        """
        if self._failure is not None:
            raise self._failure
        deadline = time.monotonic() + deadline_s
        for future in self._exports:
            future.result(max(deadline - time.monotonic(), 0))
        for future in self._sends:
            future.result(max(deadline - time.monotonic(), 0))

    def _export(self, layer: int, start: int, kv) -> None:
        host = np.asarray(kv).view(self._store.layout.raw)
        self._send(layer, start, host)
        if self._missing:
            self._store_blocks(layer - self._first_layer, host)

    def _send(self, layer: int, start: int, kv: np.ndarray) -> None:
        header = KVPiece(self.run.dispatch, layer, start, kv.shape[1], self.run.request.prompt_tokens)
        self._sends.append(self._links.send_buffers(self.run.decoding, header, [kv[0], kv[1]]))

    def _store_blocks(self, layer: int, kv: np.ndarray) -> None:
        """Store the blocks that this chunk completes; keep the rest for the next chunk."""
        size, first = self._store.layout.tokens, self._next_block[layer]
        tokens = np.concatenate([self._partial[layer], kv], axis=1) if layer in self._partial else kv
        full = tokens.shape[1] // size
        self._partial[layer] = tokens[:, full * size :]
        self._next_block[layer] += full
        chosen = [i for i in range(first, first + full) if i in self._missing]
        if chosen:
            blocks = tokens[:, : full * size].reshape(2, full, size, *tokens.shape[2:]).swapaxes(0, 1)
            self._store.write([self._slots[i] for i in chosen], layer, blocks[[i - first for i in chosen]])
