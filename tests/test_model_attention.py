"""Tiled attention, over a buffer and over pages, against plain attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_jax.model.attention import TILE, paged_attention, pages_per_tile, plain_attention, prefill_attention

H, K, D = 6, 2, 8
prefill_jitted, paged_jitted, plain_jitted = (
    jax.jit(prefill_attention),
    jax.jit(paged_attention),
    jax.jit(plain_attention),
)


def normal(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@settings(max_examples=20, deadline=None)
@given(tokens=st.sampled_from([1, 16, 200]), start=st.integers(0, 440), size=st.sampled_from([5 * TILE, 6 * TILE]))
def test_prefill_attention_equals_plain_attention(tokens, start, size):
    q, kv = normal(start, tokens, H, D), normal(1, 2, size, K, D)
    np.testing.assert_allclose(prefill_jitted(q, kv, start), plain_jitted(q, kv, start), atol=1e-5)


def test_prefill_attention_in_a_buffer_shorter_than_a_tile():
    q, kv = normal(0, 16, H, D), normal(1, 2, 32, K, D)
    np.testing.assert_allclose(prefill_jitted(q, kv, 7), plain_jitted(q, kv, 7), atol=1e-5)


@pytest.mark.parametrize("start", [0, TILE - 16, TILE - 15, 3 * TILE])
def test_prefill_attention_visits_no_tile_behind_the_last_query(start):
    q, kv = normal(0, 16, H, D), normal(1, 2, 6 * TILE, K, D)
    needed = -(-(start + 16) // TILE)
    kv[:, needed * TILE :] = np.nan
    assert np.isfinite(prefill_jitted(q, kv, start)).all()


@settings(max_examples=20, deadline=None)
@given(
    page=st.sampled_from([1, 16, 48, 256]),
    lengths=st.lists(st.integers(1, 300), min_size=3, max_size=3),
    seed=st.integers(0, 9),
)
def test_paged_attention_equals_plain_attention(page, lengths, seed):
    needed = -(-300 // page)
    columns = -(-needed // pages_per_tile(page)) * pages_per_tile(page)
    pages = normal(seed, 1 + 3 * needed, 2, page, K, D)
    table = np.zeros((3, columns), np.int32)
    table[:, :needed] = 1 + np.random.default_rng(seed).permutation(3 * needed).reshape(3, needed)
    q = normal(seed + 1, 3, H, D)
    out = paged_jitted(q, pages, table, np.asarray(lengths, np.int32))
    for b, length in enumerate(lengths):
        kv = pages[table[b]].swapaxes(0, 1).reshape(2, -1, K, D)
        np.testing.assert_allclose(out[b], plain_jitted(q[b : b + 1], kv, length - 1)[0], atol=1e-5)


def test_paged_attention_visits_no_page_behind_the_longest_request():
    pages, table = normal(0, 40, 2, 16, K, D), np.arange(32, dtype=np.int32).reshape(2, 16)
    pages[[*range(8, 16), *range(24, 40)]] = np.nan
    out = paged_jitted(normal(1, 2, H, D), pages, table, np.asarray([3, TILE], np.int32))
    assert np.isfinite(out).all()


def test_bfloat16_attention_sums_in_float32():
    q, kv = normal(0, 16, H, D, dtype=jnp.bfloat16), normal(1, 2, 4 * TILE, K, D, dtype=jnp.bfloat16)
    out = prefill_jitted(q, kv, 400)
    assert out.dtype == jnp.bfloat16
    plain = plain_jitted(q.astype(np.float32), kv.astype(np.float32), 400)
    np.testing.assert_allclose(out.astype(np.float32), plain, atol=0.01)
