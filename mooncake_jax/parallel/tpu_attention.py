"""Paged attention for decoding on TPUs: one Pallas kernel that reads the engine's pages where they lie.

JAX ships such kernels, but for pages in another order than the messenger and the block store have them: using one would
transpose all pages at every step. Here a grid step is one tile of one request (pages_per_tile pages): as many steps as
there are tiles that hold tokens, and none for what lies behind a request's length. Block table and lengths are scalars
fetched ahead, from which a step's pages are found and copied while the step before computes. A token's KV heads are
rows side by side, all multiplied with every query head, and the products with foreign heads are masked: more of them
than needed, but no keys are moved into another order. Sums are float32; float32 products are not rounded to bfloat16.

Equal to the reference in Pallas' TPU interpreter, lowered for TPUs in the tests, and compiled once without a TPU by
libtpu for v4, v5e, v5p, v6e and v7x; never run on a TPU, and never timed. Knows nothing of models and requests.
Importing it needs Pallas' TPU module.

Legend: B batch, N pages, P pages a request, H query heads, K KV heads, D head dim, R = tokens of a tile times K.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mooncake_jax.model.attention import pages_per_tile

_MASKED = -1e30  # not -inf: a row of length 0 would give inf - inf
_TABLE_ENTRIES = 1 << 16  # int32 numbers: a quarter of the scalar memory (1 MiB) that holds the table during a call
# Of keys and values: two tiles and the scores must fit what a kernel gets of VMEM (16 MiB on v5e).
_TILE_BYTES = 4 << 20
_LANES, _SUBLANES, _PACKED_ROWS = 128, 8, 16  # an array's last two axes lie in tiles of 8 x 128, or of 16 x 128 16-bit


def reads_in_place(pages: jax.Array) -> bool:
    """Whether the kernel can read pages [N, 2, page, K, D] without XLA copying all of them into another order first.

    With other numbers of heads or other head dims than the LLaMAs' 128 they lie padded or transposed in a TPU's memory.
    """
    page, kv_heads, dim = pages.shape[2:]
    whole = kv_heads in (1, 2, 4) or kv_heads % _SUBLANES == 0
    tile = 2 * pages_per_tile(page) * page * kv_heads * dim * pages.dtype.itemsize
    return dim == _LANES and whole and page * kv_heads % _PACKED_ROWS == 0 and tile <= _TILE_BYTES


def tpu_paged_attention(q: jax.Array, pages: jax.Array, block_table: jax.Array, lengths: jax.Array) -> jax.Array:
    """model.attention.paged_attention's contract. Rows of length 0 give zeros, and what pages hold behind a request's
    length need not be finite.
    """
    rows = max(1, _TABLE_ENTRIES // block_table.shape[1])
    parts = [
        _attend(q[first : first + rows], pages, block_table[first : first + rows], lengths[first : first + rows])
        for first in range(0, len(q), rows)
    ]
    return jnp.concatenate(parts)


def _attend(q: jax.Array, pages: jax.Array, block_table: jax.Array, lengths: jax.Array) -> jax.Array:
    """The same for a table that fits the scalar memory."""
    (_, heads, dim), (_, _, page, kv_heads, _) = q.shape, pages.shape
    columns = pages_per_tile(page)
    width = columns * page
    steps, owners, firsts = _schedule(lengths, width, block_table.shape[1] // columns)
    row = pl.BlockSpec((1, heads, dim), lambda step, owners, *_: (owners[step], 0, 0))
    foreign = pl.BlockSpec((heads, width * kv_heads), lambda *_: (0, 0))
    page_rows = (1, 2, page * kv_heads, dim)
    find = partial(_find_page, page, columns, block_table.shape[1])
    call = pl.pallas_call(
        partial(_visit, width, kv_heads),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(steps,),
            # The same pages as several operands: each step copies one page of each.
            in_specs=[row, foreign, *(pl.BlockSpec(page_rows, partial(find, column)) for column in range(columns))],
            out_specs=row,
            scratch_shapes=[pltpu.VMEM((heads, lanes), jnp.float32) for lanes in (1, 1, dim)],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        name="paged_attention",
    )
    own = jnp.arange(heads)[:, None] // (heads // kv_heads) == jnp.arange(width * kv_heads) % kv_heads
    flat = pages.reshape(-1, *page_rows[1:])
    return call(owners, firsts, lengths, block_table.reshape(-1), q, jnp.where(own, 0.0, _MASKED), *[flat] * columns)


def _schedule(lengths: jax.Array, width: int, most: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """How many grid steps there are, each step's request [B * most], and each request's first step [B].

    A request of length 0 has a step too: somebody must write its row of the output.
    """
    tiles = jnp.maximum(1, (lengths + width - 1) // width)
    ends = jnp.cumsum(tiles)
    owners = jnp.searchsorted(ends, jnp.arange(len(lengths) * most), side="right", method="compare_all")
    return ends[-1], jnp.minimum(owners, len(lengths) - 1).astype(jnp.int32), (ends - tiles).astype(jnp.int32)


def _find_page(page: int, columns: int, table_width: int, column: int, step, owners, firsts, lengths, table):
    """The block that a step copies as its column-th page.

    Behind the request's last page it is the one that the step before had there, which Pallas does not copy again; a
    request's first step, which has none before it, takes the last page once more.
    """
    request = owners[step]
    tile = step - firsts[request]
    last = jax.lax.div(jnp.maximum(lengths[request] - 1, 0), page)
    wanted = tile * columns + column
    kept = jnp.where(tile > 0, wanted - columns, last)
    return table[request * table_width + jnp.where(wanted > last, kept, wanted)], 0, 0, 0


def _visit(width: int, kv_heads: int, owners, firsts, lengths, table, q, foreign, *refs) -> None:
    """A grid step: one tile of online softmax.

    q and out [1, H, D] are the request's; foreign [H, R] is added to the scores and masks other heads' keys; each page
    [1, 2, page * K, D]. highest [H, 1], total [H, 1] and values [H, D] are carried from step to step.
    """
    *pages, out, highest, total, values = refs
    request = owners[pl.program_id(0)]
    tile = pl.program_id(0) - firsts[request]
    held = lengths[request] - tile * width  # tokens from this tile on

    @pl.when(tile == 0)
    def _():
        highest[...] = jnp.full(highest.shape, _MASKED, highest.dtype)
        total[...] = jnp.zeros(total.shape, total.dtype)
        values[...] = jnp.zeros(values.shape, values.dtype)

    keys, new = (jnp.concatenate([_read(page, part, q.dtype) for page in pages]) for part in (0, 1))
    # Freed pages keep what was in them: a weight of 0 times a NaN would still be one.
    new = jnp.where(_before(held * kv_heads, new.shape, 0), new, jnp.zeros_like(new))
    scores = _product(q[0], keys, 1) * q.shape[2] ** -0.5 + foreign[...]
    scores = jnp.where(_before(held * kv_heads, scores.shape, 1), scores, _MASKED)
    before, now = highest[...], jnp.maximum(highest[...], scores.max(axis=1, keepdims=True))
    weights, decay = jnp.exp(scores - now), jnp.exp(before - now)
    highest[...] = now
    total[...] = total[...] * decay + weights.sum(axis=1, keepdims=True)
    values[...] = values[...] * decay + _product(weights.astype(new.dtype), new, 0)

    @pl.when(held <= width)
    def _():
        out[0] = (values[...] / total[...]).astype(out.dtype)


def _read(page, part: int, dtype: jnp.dtype) -> jax.Array:
    """Keys (part 0) or values (1), [page * K, D], of a page that holds dtype or its bits."""
    rows = page[0, part]
    return rows if rows.dtype == dtype else pltpu.bitcast(rows, dtype)


def _before(end: jax.Array, shape: tuple[int, int], axis: int) -> jax.Array:
    """Which elements of shape have an index along axis below end."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis) < end


def _product(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """a's last axis with this one of b, summed in float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None  # else a TPU rounds to bfloat16
    dimensions = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
