"""Which attention runs on which platform, behind one function each for prefill and decoding.

The tiled scans of model/attention.py run anywhere and are the reference. On CPUs prefill cuts a chunk's queries into
blocks, so that each block leaves out the tiles behind it, and decoding works on whole rows of a page with all KV heads
in them. On GPUs prefill in bfloat16 is cuDNN's. On TPUs decoding is a Pallas kernel (tpu_attention.py); prefill is the
blocks: plain products and a loop, which XLA compiles there as it stands. Whatever is chosen equals the reference within
rounding; the choice is made when a step is compiled. Knows nothing of models and requests.

Legend: B batch, T query tokens, S context tokens, N pages, P pages a request, H query heads, K KV heads, D head dim.
"""

from types import ModuleType

import jax
import jax.numpy as jnp

from mooncake_jax.model.attention import online_softmax, paged_attention, pages_per_tile, prefill_attention, read_pages

_QUERY_BLOCK = 256  # tokens: the fastest of 128, 256 and 512 on two CPU cores, in float32 and bfloat16
_MOST_MERGED_HEADS = 4  # beyond, products with zeros cost more than the copies they spare
_CUDNN_HEAD_DIM = 128


def attend_chunk(q: jax.Array, kv: jax.Array, start: jax.Array) -> jax.Array:
    """Causal attention of a chunk's queries over its KV buffer: prefill_attention's contract, by platform."""
    if jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16 and q.shape[-1] <= _CUDNN_HEAD_DIM:
        return fused_attention(q, kv, start, "cudnn")
    return blocked_attention(q, kv, start)


def attend_pages(q: jax.Array, pages: jax.Array, block_table: jax.Array, lengths: jax.Array) -> jax.Array:
    """Attention of one query a request over its pages: paged_attention's contract, by platform."""
    if jax.default_backend() == "cpu" and pages.shape[3] <= _MOST_MERGED_HEADS:
        return merged_paged_attention(q, pages, block_table, lengths)
    if jax.default_backend() == "tpu" and (kernel := _tpu_attention()) and kernel.reads_in_place(pages):
        return kernel.tpu_paged_attention(q, pages, block_table, lengths)
    return paged_attention(q, pages, block_table, lengths)


def _tpu_attention() -> ModuleType | None:
    """The TPU's kernel, imported only where it is used; None where JAX comes without Pallas for TPUs."""
    try:
        from mooncake_jax.parallel import tpu_attention
    except ImportError:
        return None
    return tpu_attention


def blocked_attention(q: jax.Array, kv: jax.Array, start: jax.Array) -> jax.Array:
    """prefill_attention, block of queries by block: none looks at the chunk's later tiles."""
    blocks = [
        prefill_attention(q[first : first + _QUERY_BLOCK], kv, start + first)
        for first in range(0, q.shape[0], _QUERY_BLOCK)
    ]
    return jnp.concatenate(blocks)


def fused_attention(q: jax.Array, kv: jax.Array, start: jax.Array, implementation: str) -> jax.Array:
    """The same by jax.nn.dot_product_attention: "cudnn" on a GPU, "xla" anywhere. Its work follows the buffer's size,
    not the true length.
    """
    seen = start + jnp.arange(q.shape[0])[:, None] >= jnp.arange(kv.shape[1])
    out = jax.nn.dot_product_attention(
        q[None], kv[0][None], kv[1][None], mask=seen[None, None], implementation=implementation
    )
    return out[0]


def merged_paged_attention(q: jax.Array, pages: jax.Array, block_table: jax.Array, lengths: jax.Array) -> jax.Array:
    """paged_attention with the KV heads of a token left side by side, as they lie in memory.

    A query is widened to all KV heads with zeros at the others: K times the products, but neither keys nor values are
    moved into another order, which on CPUs costs more.
    """
    (batch, heads, dim), (_, _, page, kv_heads, _) = q.shape, pages.shape
    own = jnp.eye(kv_heads, dtype=q.dtype)
    rows = jnp.einsum("bkgd,kj->bkgjd", q.reshape(batch, kv_heads, -1, dim), own).reshape(batch, heads, -1)
    rows = rows * jnp.asarray(dim**-0.5, q.dtype)
    columns = pages_per_tile(page)
    width = columns * page
    flat = pages.reshape(*pages.shape[:3], -1)

    def tile(j: jax.Array):
        ids = jax.lax.dynamic_slice_in_dim(block_table, j * columns, columns, axis=1)
        keys, values = (x.reshape(batch, width, -1) for x in read_pages(flat, ids, q.dtype))
        scores = jnp.einsum("bhe,bse->bhs", rows, keys, preferred_element_type=jnp.float32)
        held = (j * width + jnp.arange(width) < lengths[:, None])[:, None]

        def product(weights: jax.Array) -> jax.Array:
            return jnp.einsum("bhs,bse->bhe", weights.astype(q.dtype), values, preferred_element_type=jnp.float32)

        return scores, held, product

    out = online_softmax(rows.shape[:2], rows.shape[2], ((jnp.max(lengths) + width - 1) // width, tile))
    out = out.reshape(batch, kv_heads, -1, kv_heads, dim)
    return jnp.einsum("bkgkd->bkgd", out).reshape(q.shape).astype(q.dtype)
