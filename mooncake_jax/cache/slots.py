"""Slots: how KVCache blocks lie in DRAM, each behind a header that tells whether the block is whole.

A header names the block, says which layers are written and what each layer's checksum is, and has a checksum of its
own. So whoever has a slot's bytes can tell alone that they are the block it wanted, all of it and untorn: a rank, say,
that has read them from another rank's memory without its help. Knows nothing of where slots come from.
"""

from collections.abc import Sequence

import numpy as np
import xxhash

from mooncake_jax.cache.keys import KEY_BYTES
from mooncake_jax.cache.layout import BlockLayout

_ALIGNMENT = 64  # of headers, payloads and so of slots, in bytes: a line of the processor's cache
_MAGIC = int.from_bytes(b"KVCSLOT1", "little")
_VOID = 0
_UNCHECKED = 16  # bytes of a header: the magic and the check itself


class NotWhole(Exception):
    """A slot does not hold the block that was wanted, or not all of it as it was written. One line."""


def header_bytes(layout: BlockLayout) -> int:
    return _aligned(_header_type(layout).itemsize)


def slot_bytes(layout: BlockLayout) -> int:
    """Of a header and a block."""
    return header_bytes(layout) + _aligned(layout.nbytes)


class Slots:
    """Views of the slots in memory, which is uint8 [slots, slot_bytes(layout)].

    blocks: [slots, layers, 2, tokens, kv_heads, head_dim]; sums: uint64 [slots, layers]; written: bool [slots, layers].
    """

    def __init__(self, memory: np.ndarray, layout: BlockLayout):
        header, start = _header_type(layout), header_bytes(layout)
        self._headers = memory[:, : header.itemsize]
        fields = self._headers.view(header)[:, 0]
        self._magics, self._checks, self._keys = fields["magic"], fields["check"], fields["key"]
        self.sums, self.written = fields["sums"], fields["written"]
        payloads = memory[:, start : start + layout.nbytes]
        self._pieces = payloads.reshape(len(memory), layout.layers, layout.nbytes // layout.layers)
        self.blocks = payloads.view(layout.raw).reshape(len(memory), *layout.shape)

    def wipe(self) -> None:
        """No slot holds anything, whatever the memory held."""
        self._magics[:] = _VOID

    def void(self, slot: int, key: bytes) -> None:
        """Give the slot to this block, of which nothing is written yet."""
        self._magics[slot] = _VOID  # first, so that no half-made header is taken for a whole one
        self._keys[slot] = np.frombuffer(key, np.uint8)
        self.written[slot] = False
        self._seal(slot)

    def mark(self, slot: int, layers: int | slice, sums: np.uint64 | np.ndarray) -> None:
        """These layers are written, and have these checksums."""
        self.sums[slot, layers] = sums
        self.written[slot, layers] = True
        self._seal(slot)

    def _seal(self, slot: int) -> None:
        self._checks[slot] = xxhash.xxh3_64_intdigest(self._headers[slot, _UNCHECKED:])
        self._magics[slot] = _MAGIC

    def checksum(self, slot: int, layer: int) -> int:
        """Of what lies there now."""
        return xxhash.xxh3_64_intdigest(self._pieces[slot, layer])

    def check_layer(self, slot: int, layer: int) -> None:
        """Raises NotWhole unless the layer is written and intact."""
        if not self.written[slot, layer]:
            raise NotWhole(f"layer {layer} is not written")
        if self.sums[slot, layer] != self.checksum(slot, layer):
            raise NotWhole(f"layer {layer} does not match its checksum")

    def check_header(self, slot: int, key: bytes) -> None:
        """Raises NotWhole unless the slot is this block's and the header intact; says nothing of the layers."""
        if self._magics[slot] != _MAGIC:
            raise NotWhole("it is empty")
        if self._keys[slot].tobytes() != key:
            raise NotWhole("it holds another block")
        if self._checks[slot] != xxhash.xxh3_64_intdigest(self._headers[slot, _UNCHECKED:]):
            raise NotWhole("its header is torn")

    def headers(self, slots: Sequence[int]) -> np.ndarray:
        """As they are now, for check_unchanged()."""
        return self._headers[np.asarray(slots)]

    def check_unchanged(self, slots: Sequence[int], headers: np.ndarray) -> None:
        """Raises NotWhole if a slot was given away or written since its header was taken: what was read from it in the
        meantime may be anything.
        """
        if not np.array_equal(headers, self.headers(slots)):
            raise NotWhole("it was written while it was read")

    def check(self, slot: int, key: bytes) -> None:
        """Raises NotWhole unless the slot holds all of this block, intact."""
        self.check_header(slot, key)
        for layer in range(self.sums.shape[1]):
            self.check_layer(slot, layer)


def _header_type(layout: BlockLayout) -> np.dtype:
    """The magic is written last, when all the rest is true; the check is of all that follows it."""
    return np.dtype(
        [
            ("magic", "<u8"),
            ("check", "<u8"),
            ("key", "u1", KEY_BYTES),
            ("sums", "<u8", layout.layers),
            ("written", "?", layout.layers),
        ]
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
