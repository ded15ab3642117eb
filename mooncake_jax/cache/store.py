"""BlockStore: the bytes of KVCache blocks in one node's DRAM (report 3, figure 3).

A slot holds one block in the canonical layout (layout.py) behind a header of its own (slots.py), both in one slab of
memory, which may be a window that other ranks read one-sided. Each layer of a block carries a checksum, which every
read verifies. Knows nothing of which slots are in use, or of other nodes: cache/pool.py does.

Pieces are copied one by one and hashed while they are in the processor's cache, so that a checksum costs a tenth of a
copy. TensorStore, which moves blocks between SSD and this slab, is not asked to copy within DRAM: measured on 20 MiB
blocks, a call of its array driver takes 20 to 50 us, a layer's copy 8, so that puts and gets came to half of memcpy's
rate instead of nine tenths, and a write to several slots at once to a tenth.

Safe for one writer of a slot at a time, and any number of readers of slots that nobody writes, which pinned
reservations guarantee. A slot that is given away all the same while a call reads it is noticed.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from mooncake_jax.cache.layout import BlockLayout
from mooncake_jax.cache.pool import Block
from mooncake_jax.cache.slots import NotWhole, Slots, slot_bytes

_ALIGNMENT = 64
_ALL = slice(None)


class BlockStore:
    """A slab of DRAM with room for `slots` blocks. Arrays given and taken are of any type with the layout's item
    size. memory: where the slab shall lie, uint8 of bytes_needed() at least, at an address that is a multiple of 64;
    it is wiped. Without it memory is allocated, and backed by pages when first written.
    """

    def __init__(self, slots: int, layout: BlockLayout, memory: np.ndarray | None = None):
        self.layout = layout
        self._slot_bytes, needed = slot_bytes(layout), self.bytes_needed(slots, layout)
        slab = _allocated(needed) if memory is None else _checked(memory, needed)
        self._raw = slab[:needed].reshape(slots, self._slot_bytes)
        self._slots = Slots(self._raw, layout)
        if memory is not None:
            self._slots.wipe()

    @staticmethod
    def bytes_needed(slots: int, layout: BlockLayout) -> int:
        return slots * slot_bytes(layout)

    def slot_range(self, slot: int) -> tuple[int, int]:
        """Offset and bytes of a slot in the slab, header and all."""
        return slot * self._slot_bytes, self._slot_bytes

    def raw(self, slot: int) -> np.ndarray:
        """A slot's bytes, header and all, to read another node's slot into: uint8, contiguous."""
        return self._raw[slot]

    # Whole blocks.

    def put(self, block: Block, kv: np.ndarray) -> None:
        """Store a block in its slot. kv: [layers, 2, tokens, kv_heads, head_dim]."""
        self.claim([block])
        sums = np.empty(self.layout.layers, np.uint64)
        for layer, (target, piece) in enumerate(zip(self._slots.blocks[block.slot], kv.view(self.layout.raw))):
            np.copyto(target, piece)
            sums[layer] = self._slots.checksum(block.slot, layer)
        self._slots.mark(block.slot, _ALL, sums)

    def get(self, block: Block, out: np.ndarray, layers: slice = _ALL, heads: slice = _ALL) -> None:
        """Read a block, or some layers and KV heads of it, into out: [layers, 2, tokens, heads, head_dim], of which
        only what is read is touched. Raises NotWhole; then out holds anything.
        """
        slot, chosen = block.slot, range(self.layout.layers)[layers]
        self._slots.check_header(slot, block.key)
        headers = self._slots.headers([slot])
        pieces = self._slots.blocks[slot, layers, :, :, heads]
        for layer, target, piece in zip(chosen, out.view(self.layout.raw), pieces, strict=True):
            np.copyto(target, piece)
            self._slots.check_layer(slot, layer)
        self._slots.check_unchanged([slot], headers)

    def adopt(self, block: Block, sums: np.ndarray) -> None:
        """The block has been put into block(slot), and has been found to have these checksums, one a layer: it is
        whole from now on. Its slot must have been claimed before.
        """
        self._slots.check_header(block.slot, block.key)
        self._slots.mark(block.slot, _ALL, sums)

    def block(self, slot: int) -> np.ndarray:
        """What lies in a slot: a view [layers, 2, tokens, kv_heads, head_dim] of the layout's raw type, contiguous."""
        return self._slots.blocks[slot]

    def sums(self, slot: int) -> np.ndarray:
        """Checksums of the block in a slot, as it was written: uint64 [layers]."""
        return self._slots.sums[slot].copy()

    def sound(self, blocks: Sequence[Block]) -> int:
        """How many leading blocks lie in their slots, complete and matching their checksums in every layer."""
        for count, block in enumerate(blocks):
            try:
                self._slots.check(block.slot, block.key)
            except NotWhole:
                return count
        return len(blocks)

    # Single layers of several blocks, as an engine computes and wants them.

    def claim(self, blocks: Iterable[Block]) -> None:
        """These blocks are about to be written to their slots: what lay there no longer counts as sound."""
        for block in blocks:
            self._slots.void(block.slot, block.key)

    def write(self, slots: Sequence[int], layer: int, blocks: np.ndarray) -> None:
        """Store one layer of several blocks. blocks: [len(slots), 2, tokens, kv_heads, head_dim]."""
        for slot, block in zip(slots, blocks.view(self.layout.raw), strict=True):
            np.copyto(self._slots.blocks[slot, layer], block)
            self._slots.mark(slot, layer, self._slots.checksum(slot, layer))

    def read(self, slots: Sequence[int], layer: int, heads: slice = _ALL, out: np.ndarray | None = None) -> np.ndarray:
        """One layer of several successive blocks, in token order: [2, len(slots) * tokens, heads, head_dim], bits in
        fresh memory unless there is an out. Raises NotWhole; then out holds anything.
        """
        _, _, tokens, kv_heads, head_dim = self.layout.shape
        read_heads = len(range(*heads.indices(kv_heads)))
        if out is None:
            out = np.empty((2, len(slots) * tokens, read_heads, head_dim), self.layout.raw)
        targets = out.view(self.layout.raw).reshape(2, len(slots), tokens, read_heads, head_dim)
        headers = self._slots.headers(slots)
        for place, slot in enumerate(slots):
            np.copyto(targets[:, place], self._slots.blocks[slot, layer, :, :, heads])
            self._slots.check_layer(slot, layer)
        self._slots.check_unchanged(slots, headers)
        return out


def _allocated(nbytes: int) -> np.ndarray:
    memory = np.zeros(nbytes + _ALIGNMENT, np.uint8)  # zeros that the system has made are no work
    return memory[-memory.ctypes.data % _ALIGNMENT :]


def _checked(memory: np.ndarray, needed: int) -> np.ndarray:
    if memory.dtype != np.uint8 or memory.ndim != 1 or not memory.flags.c_contiguous or not memory.flags.writeable:
        raise ValueError(f"{memory.dtype}{list(memory.shape)}: a slab lies in one piece of writeable bytes")
    if memory.size < needed or memory.ctypes.data % _ALIGNMENT:
        place = f"{memory.size} bytes at {memory.ctypes.data:#x}"
        raise ValueError(f"{place}: the slab takes {needed} at a multiple of {_ALIGNMENT}")
    return memory
