"""Every attention that this machine can run equals the reference; platforms choose among them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mooncake_jax.model.attention import TILE, paged_attention, pages_per_tile, plain_attention, prefill_attention
from mooncake_jax.parallel.attention import (
    attend_chunk,
    attend_pages,
    blocked_attention,
    fused_attention,
    merged_paged_attention,
)

FUSED = ["xla", pytest.param("cudnn", marks=pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU"))]
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.02}


def normal(seed, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def assert_near(out, reference, dtype):
    assert out.dtype == dtype
    np.testing.assert_allclose(out.astype(np.float32), reference.astype(np.float32), atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens, start", [(16, 0), (256, 100), (300, 77), (512, 0), (700, 60)])
def test_chunks_in_blocks_equal_the_reference(dtype, tokens, start):
    q, kv = normal(0, tokens, 6, 8, dtype=dtype), normal(1, 2, 8 * TILE, 2, 8, dtype=dtype)
    reference = prefill_attention(q, kv, start)
    assert_near(jax.jit(blocked_attention)(q, kv, start), reference, dtype)
    assert_near(jax.jit(attend_chunk)(q, kv, start), reference, dtype)


def test_blocks_leave_out_the_tiles_behind_them():
    q, kv = normal(0, 512, 6, 8), normal(1, 2, 8 * TILE, 2, 8)
    kv = kv.at[:, 256:].set(np.nan)
    out = jax.jit(blocked_attention)(q, kv, 0)
    assert np.isfinite(out[:256]).all() and np.isnan(out[300:]).all()


@pytest.mark.parametrize("implementation", FUSED)
def test_fused_attention_equals_the_reference(implementation):
    q, kv = normal(0, 128, 8, 64, dtype="bfloat16"), normal(1, 2, 256, 2, 64, dtype="bfloat16")
    for start in (0, 100):
        out = jax.jit(fused_attention, static_argnums=3)(q, kv, start, implementation)
        assert_near(out, plain_attention(q, kv, start), "bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads, kv_heads", [(6, 2), (3, 3), (4, 1), (8, 8)])
@pytest.mark.parametrize("bits", [False, True])
def test_paged_attentions_equal_the_reference(dtype, heads, kv_heads, bits):
    page, lengths = 16, np.array([1, 300, 129], np.int32)
    columns = -(-19 // pages_per_tile(page)) * pages_per_tile(page)
    pages, q = normal(0, 58, 2, page, kv_heads, 8, dtype=dtype), normal(1, 3, heads, 8, dtype=dtype)
    table = np.zeros((3, columns), np.int32)
    table[:, :19] = 1 + np.random.default_rng(2).permutation(57).reshape(3, 19)
    reference = paged_attention(q, pages, table, lengths)
    stored = jax.lax.bitcast_convert_type(pages, {"float32": "uint32", "bfloat16": "uint16"}[dtype]) if bits else pages
    for attention in (paged_attention, merged_paged_attention, attend_pages):
        assert_near(jax.jit(attention)(q, stored, table, lengths), reference, dtype)
