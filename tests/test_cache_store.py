"""BlockStore: bytes come back as they went in, and damage is noticed."""

import ml_dtypes
import numpy as np
import pytest

from mooncake_jax.cache.pool import Block
from mooncake_jax.cache.store import BlockLayout, BlockStore

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@pytest.fixture(params=sorted(DTYPES))
def store(request):
    return BlockStore(8, BlockLayout(layers=3, tokens=4, kv_heads=2, head_dim=8, dtype=request.param))


def random_blocks(store, count, seed=0):
    _, _, tokens, kv_heads, head_dim = store.layout.shape
    values = np.random.default_rng(seed).standard_normal((count, 2, tokens, kv_heads, head_dim))
    return values.astype(DTYPES[store.layout.dtype])


def block(slot):
    return Block(bytes([slot]) * 32, slot)


def fill(store, slots):
    store.claim(map(block, slots))
    layers = [random_blocks(store, len(slots), seed) for seed in range(store.layout.layers)]
    for layer, blocks in enumerate(layers):
        store.write(slots, layer, blocks)
    return layers


def test_layers_of_successive_blocks_read_back_in_token_order(store):
    slots = [5, 0, 7]
    layers = fill(store, slots)
    for layer, blocks in enumerate(layers):
        got = store.read(slots, layer).view(blocks.dtype)
        assert np.array_equal(got, blocks.swapaxes(0, 1).reshape(got.shape))


def test_reads_are_copies(store):
    [first, *_] = fill(store, [2])
    got = store.read([2], 0).view(first.dtype)
    store.write([2], 0, random_blocks(store, 1, seed=9))
    assert np.array_equal(got[:, :], first.swapaxes(0, 1).reshape(got.shape))


def test_sound_needs_every_layer(store):
    store.claim([block(1)])
    store.write([1], 0, random_blocks(store, 1))
    assert store.sound([block(1)]) == 0
    fill(store, [1])
    assert store.sound([block(1)]) == 1


def test_sound_needs_the_right_block(store):
    fill(store, [1])
    assert store.sound([Block(b"other" + bytes(27), 1)]) == 0


def test_a_flipped_bit_ends_the_sound_prefix(store):
    fill(store, [4, 3, 6])
    blocks = [block(4), block(3), block(6)]
    assert store.sound(blocks) == 3
    store._slab[3, 2].view(np.uint8).reshape(-1)[10] ^= 1
    assert store.sound(blocks) == 1
    assert store.sound([block(3)]) == 0


def test_claimed_slots_are_not_sound_until_rewritten(store):
    fill(store, [4])
    store.claim([block(4)])
    assert store.sound([block(4)]) == 0
    fill(store, [4])
    assert store.sound([block(4)]) == 1


def test_layout_sizes():
    layout = BlockLayout(layers=80, tokens=512, kv_heads=8, head_dim=128, dtype="bfloat16")
    assert layout.bytes_per_token == 320 * 1024  # LLaMA2-70B, report 3
    assert layout.nbytes == 512 * 320 * 1024
