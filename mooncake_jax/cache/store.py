"""BlockStore: the bytes of KVCache blocks in one node's DRAM, through TensorStore (report 3, figure 3).

A slot holds one block in the canonical layout [layer][K|V][token][kv head][head dim], whatever the parallelism of the
engine that wrote it. Each slot knows the key of its block, and each (slot, layer) piece carries a checksum. Knows
nothing of which slots are in use, or of other nodes: cache/pool.py does.

Safe for one writer and several readers of different slots at a time, which pinned reservations guarantee.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import tensorstore as ts
import xxhash

from mooncake_jax.cache.pool import Block

COPY_THREADS = 2  # more gains nothing at these sizes: a layer of a chunk is a few MiB


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Shape and type of one block: [layers, 2, tokens, kv_heads, head_dim]."""

    layers: int
    tokens: int
    kv_heads: int
    head_dim: int
    dtype: str  # float32 or bfloat16, of which only the size matters here

    @property
    def itemsize(self) -> int:
        return 2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize

    @property
    def raw(self) -> np.dtype:
        """Type of the bit patterns that are stored: bfloat16 is no native type of numpy or MPI."""
        return np.dtype(f"u{self.itemsize}")

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return (self.layers, 2, self.tokens, self.kv_heads, self.head_dim)

    @property
    def bytes_per_token(self) -> int:
        """KVCache bytes of one token over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.itemsize

    @property
    def nbytes(self) -> int:
        return self.tokens * self.bytes_per_token


class BlockStore:
    """A slab of DRAM with room for `slots` blocks. Arrays given and taken are of any type with the layout's item
    size.
    """

    def __init__(self, slots: int, layout: BlockLayout):
        self.layout = layout
        self._slab = np.empty((slots, *layout.shape), layout.raw)  # pages are backed by memory when first written
        context = ts.Context({"data_copy_concurrency": {"limit": COPY_THREADS}})
        self._blocks = ts.array(self._slab, context=context)
        self._keys: list[bytes | None] = [None] * slots
        self._sums = np.zeros((slots, layout.layers), np.uint64)
        self._written = np.zeros((slots, layout.layers), bool)

    def claim(self, blocks: Iterable[Block]) -> None:
        """These blocks are about to be written to their slots: what lay there no longer counts as sound."""
        for block in blocks:
            self._keys[block.slot] = block.key
            self._written[block.slot] = False

    def write(self, slots: Sequence[int], layer: int, blocks: np.ndarray) -> None:
        """Store one layer of several blocks. blocks: [len(slots), 2, tokens, kv_heads, head_dim]."""
        index = np.asarray(slots)
        self._blocks[index, layer].write(blocks.view(self.layout.raw)).result()
        for slot in slots:
            self._sums[slot, layer] = self._checksum(slot, layer)
        self._written[index, layer] = True

    def read(self, slots: Sequence[int], layer: int) -> np.ndarray:
        """Bits of one layer of several successive blocks, freshly allocated: [2, len(slots) * tokens, kv_heads,
        head_dim].
        """
        _, _, tokens, kv_heads, head_dim = self.layout.shape
        out = np.empty((2, len(slots), tokens, kv_heads, head_dim), self.layout.raw)
        source = self._blocks[np.asarray(slots), layer].transpose([1, 0, 2, 3, 4])
        ts.array(out).write(source).result()
        return out.reshape(2, len(slots) * tokens, kv_heads, head_dim)

    def sound(self, blocks: Sequence[Block]) -> int:
        """How many leading blocks lie in their slots, complete and matching their checksums in every layer."""
        for count, block in enumerate(blocks):
            if self._keys[block.slot] != block.key or not self._intact(block.slot):
                return count
        return len(blocks)

    def _intact(self, slot: int) -> bool:
        return all(
            self._written[slot, layer] and self._sums[slot, layer] == self._checksum(slot, layer)
            for layer in range(self.layout.layers)
        )

    def _checksum(self, slot: int, layer: int) -> np.uint64:
        return np.uint64(xxhash.xxh3_64_intdigest(self._slab[slot, layer]))
