"""Copying blocks between the stores of two prefill instances (hot-spot migration, report 6.2), layer by layer.

Each stage copies its own layers to the same stage of the other instance. The source sends a layer of all blocks at a
time; the target stores each as it lands and reports when the last layer is in.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from mooncake_jax.cache.pool import Block
from mooncake_jax.cache.store import BlockStore
from mooncake_jax.cluster.config import stage_node
from mooncake_jax.cluster.control import BlocksLayer, CopyFailed, StageCopied
from mooncake_jax.cluster.links import Links
from mooncake_jax.sched.messages import CopyBlocks


class BlockCopies:
    """Both ends, for one stage. All its work is done in order on one thread. deadline_s: for all of a copy's sends."""

    def __init__(
        self,
        node: str,
        stage: int,
        store: BlockStore,
        links: Links,
        deadline_s: float,
        report: Callable[[StageCopied], None],
    ):
        self.node, self._stage, self._store, self._links, self._report = node, stage, store, links, report
        self._deadline_s = deadline_s
        self._thread = ThreadPoolExecutor(1, "copies")
        self._layers_left: dict[int, int] = {}  # by dispatch, of what is landing here
        self._abandoned: set[int] = set()  # their late layers must not touch slots that are given away

    # --- at the source

    def start(self, copy: CopyBlocks) -> None:
        self._thread.submit(self._copy, copy)

    def _copy(self, copy: CopyBlocks) -> None:
        try:
            sound = self._store.sound(copy.source)
            if not sound:
                raise ValueError("the block to copy is damaged")
            self._send_layers(copy, sound)
        except Exception as error:  # the target must hear of it, or the request would wait for its deadline
            failed = CopyFailed(copy.dispatch, f"{self.node}: {type(error).__name__}: {error}")
            self._links.send(stage_node(copy.to, self._stage), failed)

    def _send_layers(self, copy: CopyBlocks, blocks: int) -> None:
        slots, sends = [block.slot for block in copy.source[:blocks]], []
        for layer in range(self._store.layout.layers):
            header = BlocksLayer(copy.dispatch, layer, copy.target[:blocks])
            blocks_layer = self._store.read(slots, layer)
            sends.append(self._links.send_buffers(stage_node(copy.to, self._stage), header, [blocks_layer]))
        deadline = time.monotonic() + self._deadline_s
        for future in sends:
            future.result(max(deadline - time.monotonic(), 0))

    # --- at the target

    def place(self, header: BlocksLayer) -> Sequence[np.ndarray]:
        layout = self._store.layout
        shape = (2, len(header.target) * layout.tokens, layout.kv_heads, layout.head_dim)
        return [np.empty(shape, layout.raw)]

    def on_buffers(self, header: BlocksLayer, kv: np.ndarray) -> None:
        self._thread.submit(self._store_layer, header, kv)

    def abandon(self, dispatch: int, reason: str) -> None:
        """No more layers will come. Answered after those that did come are stored: their slots are given away then."""
        self._thread.submit(self._abandon, dispatch, reason)

    def _abandon(self, dispatch: int, reason: str) -> None:
        self._abandoned.add(dispatch)
        self._finish(dispatch, (), reason)

    def _store_layer(self, header: BlocksLayer, kv: np.ndarray) -> None:
        if header.dispatch in self._abandoned:
            return
        layout, slots = self._store.layout, [block.slot for block in header.target]
        if header.dispatch not in self._layers_left:
            self._layers_left[header.dispatch] = layout.layers
            self._store.claim(header.target)
        blocks = kv.reshape(2, len(slots), layout.tokens, layout.kv_heads, layout.head_dim).swapaxes(0, 1)
        self._store.write(slots, header.layer, np.ascontiguousarray(blocks))
        self._layers_left[header.dispatch] -= 1
        if not self._layers_left[header.dispatch]:
            self._finish(header.dispatch, header.target, None)

    def _finish(self, dispatch: int, landed: tuple[Block, ...], reason: str | None) -> None:
        self._layers_left.pop(dispatch, None)
        self._report(StageCopied(dispatch, self._stage, landed, reason))
