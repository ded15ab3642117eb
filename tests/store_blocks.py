"""Small blocks for the tests of BlockStore and its slots."""

import ml_dtypes
import numpy as np

from mooncake_jax.cache.layout import BlockLayout
from mooncake_jax.cache.pool import Block

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
LAYOUTS = {name: BlockLayout(layers=3, tokens=4, kv_heads=2, head_dim=8, dtype=name) for name in DTYPES}


def random_blocks(store, count, seed=0):
    """One layer of each: [count, 2, tokens, kv_heads, head_dim]."""
    return np.stack([random_block(store.layout, seed * count + number)[0] for number in range(count)])


def random_block(layout, seed=0):
    """[layers, 2, tokens, kv_heads, head_dim]"""
    values = np.random.default_rng(seed).standard_normal(layout.shape)
    return values.astype(DTYPES[layout.dtype])


def block(slot):
    return Block(bytes([slot]) * 32, slot)
