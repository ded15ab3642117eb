"""Copying blocks between the DRAM of two prefill instances (hot-spot migration, report 6.2).

Each stage fetches its own layers from the same stage of the other instance. Where that one's memory can be read
one-sided, it is, whatever its owner does meanwhile. Otherwise the source is asked to send a layer of all blocks at a
time; the target stores each as it lands and reports when the last layer is in.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from mooncake_jax.cache.pool import Block
from mooncake_jax.cache.store import BlockStore
from mooncake_jax.cluster.config import stage_node
from mooncake_jax.cluster.control import BlocksLayer, CopyFailed, SendBlocks, StageCopied
from mooncake_jax.cluster.links import Links
from mooncake_jax.sched.actions import FetchBlocks
from mooncake_jax.sched.messages import Replication


class BlockCopies:
    """Both ends, for one stage. All its work is done in order on one thread. deadline_s: for all of a copy."""

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
        self._open: set[int] = set()  # dispatches whose blocks are being copied here, and are not reported yet
        self._layers_left: dict[int, int] = {}  # of those, by dispatch, that land layer by layer

    # --- at the target

    def fetch(self, action: FetchBlocks) -> None:
        self._thread.submit(self._or_give_up, action.dispatch, self._fetch, action)

    def _or_give_up(self, dispatch: int, work: Callable, *arguments: Any) -> None:
        """Whatever happens is answered: blocks are pinned until then."""
        try:
            work(*arguments)
        except Exception as error:
            self._finish(dispatch, (), f"{self.node}: {type(error).__name__}: {error}")

    def _fetch(self, action: FetchBlocks) -> None:
        copy = action.replication
        source = stage_node(copy.source, self._stage)
        self._open.add(action.dispatch)
        self._store.claim(copy.target_blocks)
        if self._links.can_read(source):
            self._read(action.dispatch, source, copy)
            return
        self._layers_left[action.dispatch] = self._store.layout.layers
        self._links.send(source, SendBlocks(action.dispatch, self.node, copy.source_blocks, copy.target_blocks))

    def _read(self, dispatch: int, source: str, copy: Replication) -> None:
        """Slot by slot, header and all, into one's own slots. Then each tells whether it is the block it should be."""
        deadline = time.monotonic() + self._deadline_s
        reads, reason = [], None
        for theirs, own in zip(copy.source_blocks, copy.target_blocks):
            offset, _ = self._store.slot_range(theirs.slot)
            reads.append(self._links.read(source, offset, self._store.raw(own.slot), self._deadline_s))
        for read in reads:
            try:
                read.result(max(deadline - time.monotonic(), 0))
            except Exception as error:
                reason = f"{source}: {type(error).__name__}: {error}"
        landed = copy.target_blocks[: self._store.sound(copy.target_blocks)]
        self._store.claim(copy.target_blocks[len(landed) :])
        if not landed and reason is None:
            reason = f"{source}: the block to copy is damaged"
        self._finish(dispatch, landed, reason)

    def place(self, header: BlocksLayer) -> Sequence[np.ndarray]:
        layout = self._store.layout
        shape = (2, len(header.target) * layout.tokens, layout.kv_heads, layout.head_dim)
        return [np.empty(shape, layout.raw)]

    def on_buffers(self, header: BlocksLayer, kv: np.ndarray) -> None:
        self._thread.submit(self._or_give_up, header.dispatch, self._store_layer, header, kv)

    def abandon(self, dispatch: int, reason: str) -> None:
        """No more layers will come. Answered after those that did come are stored: their slots are given away then."""
        self._thread.submit(self._finish, dispatch, (), reason)

    def _store_layer(self, header: BlocksLayer, kv: np.ndarray) -> None:
        if header.dispatch not in self._open:  # abandoned: its slots are given away
            return
        layout, slots = self._store.layout, [block.slot for block in header.target]
        blocks = kv.reshape(2, len(slots), layout.tokens, layout.kv_heads, layout.head_dim).swapaxes(0, 1)
        self._store.write(slots, header.layer, np.ascontiguousarray(blocks))
        self._layers_left[header.dispatch] -= 1
        if not self._layers_left[header.dispatch]:
            self._finish(header.dispatch, header.target, None)

    def _finish(self, dispatch: int, landed: tuple[Block, ...], reason: str | None) -> None:
        if dispatch in self._open:
            self._open.remove(dispatch)
            self._layers_left.pop(dispatch, None)
            self._report(StageCopied(dispatch, self._stage, landed, reason))

    # --- at the source, where its memory cannot be read

    def send(self, wanted: SendBlocks) -> None:
        self._thread.submit(self._send, wanted)

    def _send(self, wanted: SendBlocks) -> None:
        try:
            sound = self._store.sound(wanted.source)
            if not sound:
                raise ValueError("the block to copy is damaged")
            self._send_layers(wanted, sound)
        except Exception as error:  # the target must hear of it, or the request would wait for its deadline
            failed = CopyFailed(wanted.dispatch, f"{self.node}: {type(error).__name__}: {error}")
            self._links.send(wanted.to, failed)

    def _send_layers(self, wanted: SendBlocks, blocks: int) -> None:
        slots, sends = [block.slot for block in wanted.source[:blocks]], []
        for layer in range(self._store.layout.layers):
            header = BlocksLayer(wanted.dispatch, layer, wanted.target[:blocks])
            sends.append(self._links.send_buffers(wanted.to, header, [self._store.read(slots, layer)]))
        deadline = time.monotonic() + self._deadline_s
        for future in sends:
            future.result(max(deadline - time.monotonic(), 0))
