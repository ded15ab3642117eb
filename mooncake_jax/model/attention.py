"""Attention over a contiguous KV buffer (prefill) and over pages (decoding), both by online softmax over tiles of keys.

The number of tiles visited follows the true length, not the buffer's: the work is proportional to the tokens that
exist, while compiled shapes stay few. Query heads that share a KV head are folded into one product, so K and V are
never repeated. Tiles are small enough that scores stay in a CPU's cache. Scores and sums are float32.
`plain_attention` is the reference that tests compare both with; parallel/attention.py chooses what runs on a platform.

Legend: B batch, T query tokens, S context tokens, H query heads, K KV heads, G = H / K, D head dim.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

TILE = 128  # tokens: the fastest of 64 to 512 on two CPU cores, for float32 and bfloat16
_MASKED = -1e30  # not -inf: a row whose first tile is wholly masked would give inf - inf

# Of tile j: scores [*rows, tile], which of them count, and product: weights [*rows, tile] -> [*rows, D].
Tile = Callable[[jax.Array], tuple[jax.Array, jax.Array, Callable]]
# Running maximum [..., R], sum [..., R] and weighted values [..., R, D] of R rows of queries.
_Carry = tuple[jax.Array, jax.Array, jax.Array]


def online_softmax(rows: tuple[int, ...], dim: int, *loops: tuple[jax.Array, Tile]) -> jax.Array:
    """Softmax-weighted values [*rows, D] over loops of so many tiles each, a traced number."""

    def visit(tile: Tile, j: jax.Array, carry: _Carry) -> _Carry:
        highest, total, values = carry
        scores, counted, product = tile(j)
        scores = jnp.where(counted, scores, _MASKED)
        new_highest = jnp.maximum(highest, scores.max(axis=-1))
        weights = jnp.exp(scores - new_highest[..., None])
        decay = jnp.exp(highest - new_highest)
        return new_highest, total * decay + weights.sum(axis=-1), values * decay[..., None] + product(weights)

    carry = (jnp.full(rows, _MASKED), jnp.zeros(rows), jnp.zeros((*rows, dim)))
    for tiles, tile in loops:
        carry = jax.lax.fori_loop(0, tiles, partial(visit, tile), carry)
    _, total, values = carry
    return values / total[..., None]


def prefill_attention(q: jax.Array, kv: jax.Array, start: jax.Array) -> jax.Array:
    """Causal attention of one request's queries over its KV buffer.

    q [T, H, D] stands at positions start .. start + T - 1; kv [2, S, K, D] holds their own keys and values already, and
    those of every position before; what lies behind is never weighed but must be finite. S is a multiple of TILE or
    below it; start + T <= S. Returns [T, H, D] in q's dtype.
    """
    tokens, dim = q.shape[0], q.shape[2]
    rows, positions = query_rows(q, kv.shape[2], start)
    width = min(TILE, kv.shape[1])
    loop = causal_loop(rows, positions, kv, 0, (start + tokens + width - 1) // width)
    return attended_queries(online_softmax(rows.shape[:2], dim, loop), q)


def query_rows(q: jax.Array, kv_heads: int, start: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Queries [T, H, D] from position start on as rows [K, G * T, D], and the rows' positions [G * T].

    A group's heads become rows, so that one product serves them all.
    """
    tokens, heads, dim = q.shape
    group = heads // kv_heads
    rows = q.reshape(tokens, kv_heads, group, dim).transpose(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    return rows, start + jnp.tile(jnp.arange(tokens), group)


def attended_queries(values: jax.Array, q: jax.Array) -> jax.Array:
    """What query_rows' rows attended to [K, G * T, D] in the order and dtype of q [T, H, D]."""
    tokens, heads, dim = q.shape
    kv_heads = values.shape[0]
    ordered = values.reshape(kv_heads, heads // kv_heads, tokens, dim).transpose(2, 0, 1, 3)
    return ordered.reshape(q.shape).astype(q.dtype)


def causal_loop(
    rows: jax.Array, positions: jax.Array, kv: jax.Array, first_key: jax.Array | int, tiles: jax.Array
) -> tuple[jax.Array, Tile]:
    """online_softmax's loop over the leading tiles of kv [2, S, K, D], whose keys stand at first_key and behind, for
    query_rows' rows at positions.
    """
    dim, width = rows.shape[-1], min(TILE, kv.shape[1])

    def tile(j: jax.Array) -> tuple[jax.Array, jax.Array, Callable]:
        keys, values = jax.lax.dynamic_slice_in_dim(kv, j * width, width, axis=1)
        scores = jnp.einsum("krd,skd->krs", rows, keys, preferred_element_type=jnp.float32)
        seen = positions[:, None] >= first_key + j * width + jnp.arange(width)

        def product(weights: jax.Array) -> jax.Array:
            weights = weights.astype(values.dtype)
            return jnp.einsum("krs,skd->krd", weights, values, preferred_element_type=jnp.float32)

        return scores * dim**-0.5, seen, product

    return tiles, tile


def paged_attention(q: jax.Array, pages: jax.Array, block_table: jax.Array, lengths: jax.Array) -> jax.Array:
    """Attention of one query a request over that request's pages.

    q [B, H, D]; pages [N, 2, page, K, D] hold q's dtype or its bits (see read_pages); block_table [B, P] int32: request
    b's token s lies in page block_table[b, s // page]; lengths [B] >= 1, the query's own token included. P is a
    multiple of pages_per_tile. Returns [B, H, D] in q's dtype.
    """
    (batch, heads, dim), (_, _, page, kv_heads, _) = q.shape, pages.shape
    group, columns = heads // kv_heads, pages_per_tile(page)
    width = columns * page
    rows = q.reshape(batch, kv_heads, group, dim)

    def tile(j: jax.Array) -> tuple[jax.Array, jax.Array, Callable]:
        ids = jax.lax.dynamic_slice_in_dim(block_table, j * columns, columns, axis=1)
        keys, values = (x.reshape(batch, width, kv_heads, dim) for x in read_pages(pages, ids, q.dtype))
        scores = jnp.einsum("bkgd,bskd->bkgs", rows, keys, preferred_element_type=jnp.float32)
        held = (j * width + jnp.arange(width) < lengths[:, None])[:, None, None]

        def product(weights: jax.Array) -> jax.Array:
            weights = weights.astype(values.dtype)
            return jnp.einsum("bkgs,bskd->bkgd", weights, values, preferred_element_type=jnp.float32)

        return scores * dim**-0.5, held, product

    out = online_softmax(rows.shape[:3], dim, ((jnp.max(lengths) + width - 1) // width, tile))
    return out.reshape(q.shape).astype(q.dtype)


def read_pages(pages: jax.Array, ids: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Keys and values, each [*ids, page, ...], of pages [N, 2, page, ...] that hold dtype or its bits as integers.

    Integers, because JAX 0.10 on CPUs gathers from bfloat16 by way of float32: of all pages, at every gather.
    """
    # Ids are the engine's own, not a user's: looking whether each names a page takes some hundredths of the time.
    keys, values = (pages.at[ids, part].get(mode="promise_in_bounds") for part in (0, 1))
    if pages.dtype != dtype:
        return jax.lax.bitcast_convert_type(keys, dtype), jax.lax.bitcast_convert_type(values, dtype)
    return keys, values


def pages_per_tile(page: int) -> int:
    """Pages of so many tokens that paged_attention visits at once."""
    return max(1, TILE // page)


def plain_attention(q: jax.Array, kv: jax.Array, start: int) -> jax.Array:
    """What prefill_attention computes, spelled out with whole rows of scores: the tests' reference."""
    keys, values = (jnp.repeat(x, q.shape[1] // kv.shape[2], axis=1).astype(jnp.float32) for x in kv)
    scores = jnp.einsum("thd,shd->hts", q.astype(jnp.float32), keys) * q.shape[-1] ** -0.5
    seen = start + jnp.arange(q.shape[0])[:, None] >= jnp.arange(kv.shape[1])
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("hts,shd->thd", weights, values).astype(q.dtype)
