"""BlockLayout: how a KVCache block lies in DRAM and on SSD, [layer][K|V][token][kv head][head dim], whatever the
parallelism of the engine that writes or reads it.
"""

from dataclasses import dataclass

import numpy as np


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
