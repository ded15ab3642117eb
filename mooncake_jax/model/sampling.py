"""Choosing the next token from logits, the same way wherever and with whomever a request runs; and its log-probability.

Everything is an array with one value a row, so that requests that are sampled differently share one compiled step; what
no row asks for is not computed. Knows nothing of requests and engines.

Legend: B batch, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mooncake_jax.request import MOST_LOGPROBS, Sampling

NO_TOKEN = -1  # instead of a token where logits are not finite numbers, as damaged weights give
NOT_FINITE = "the logits are not finite numbers: the model's weights may be damaged"


class SamplingRows(NamedTuple):
    """How each row of a batch is sampled, as Sampling has it; index counts the request's output tokens from 0."""

    temperature: jax.Array  # float32 [B]
    top_k: jax.Array  # int32 [B]
    top_p: jax.Array  # float32 [B]
    seed: jax.Array  # uint32 [B]
    index: jax.Array  # int32 [B]

    @classmethod
    def greedy(cls, size: int) -> "SamplingRows":
        """size rows of NumPy arrays, to be filled in."""
        kinds = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "seed": np.uint32}
        rows = cls(**{name: np.zeros(size, kind) for name, kind in kinds.items()}, index=np.zeros(size, np.int32))
        rows.top_p[:] = 1
        return rows

    def fill(self, row: int, sampling: Sampling, index: int) -> None:
        """Sets one row of NumPy arrays."""
        values = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed & 0xFFFFFFFF, index)
        for column, value in zip(self, values, strict=True):
            column[row] = value


def sample(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """The next token of each row: logits float32 [B, V] -> int32 [B]; NO_TOKEN where logits are no numbers.

    The choice depends on nothing but the row's own values, so it is the same in any batch and slot.
    """
    greedy = _highest(logits)
    drawn = jax.lax.cond(jnp.any(rows.temperature > 0), _draw, lambda *_: greedy, logits, rows)
    return jnp.where(rows.temperature > 0, drawn, greedy)


def logprobs(logits: jax.Array, tokens: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities of tokens [B], and the highest ones [B, MOST_LOGPROBS] with their ids; zeros unless wanted, a
    boolean scalar. A vocabulary smaller than MOST_LOGPROBS gives as many as it has.
    """
    top = min(MOST_LOGPROBS, logits.shape[1])

    def compute() -> tuple[jax.Array, jax.Array, jax.Array]:
        total = jax.nn.logsumexp(logits, axis=-1)
        values, ids = jax.lax.top_k(logits, top)
        taken = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
        return taken - total, values - total[:, None], ids

    shape = (len(tokens), top)
    nothing = (jnp.zeros(len(tokens)), jnp.zeros(shape), jnp.zeros(shape, jnp.int32))
    return jax.lax.cond(wanted, compute, lambda: nothing)


def _highest(values: jax.Array) -> jax.Array:
    """The first index of each row's maximum: argmax of [B, V], int32 [B], in two plain reductions, which on CPUs take
    a quarter of argmax's time. NO_TOKEN where the maximum is no finite number.
    """
    highest = values.max(axis=-1, keepdims=True)
    columns = jnp.arange(values.shape[1], dtype=jnp.int32)
    first = jnp.where(values >= highest, columns, values.shape[1]).min(axis=-1)
    return jnp.where(jnp.isfinite(highest[:, 0]), first, NO_TOKEN)


def _draw(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """Gumbel-max: the highest of logits / temperature + Gumbel noise is a draw from their softmax."""
    noise = jax.vmap(lambda s, i: jax.random.gumbel(jax.random.fold_in(jax.random.key(s), i), logits.shape[1:]))(
        rows.seed, rows.index
    )
    # The highest logit becomes 0, which no temperature, however small, carries to infinity.
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / jnp.where(rows.temperature > 0, rows.temperature, 1)[
        :, None
    ]
    limited = (rows.temperature > 0) & ((rows.top_k > 0) | (rows.top_p < 1))
    scaled = jax.lax.cond(jnp.any(limited), _limit, lambda same, _: same, scaled, rows)
    return _highest(scaled + noise)


def _limit(scaled: jax.Array, rows: SamplingRows) -> jax.Array:
    """scaled [B, V] with -inf for what top_k, and of its softmax top_p, leave out; equal logits: lower ids stay."""
    vocabulary = scaled.shape[1]
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1)
    most = jnp.where(rows.top_k > 0, rows.top_k, vocabulary)[:, None]
    ordered = jnp.take_along_axis(scaled, order, axis=-1)
    share = jax.nn.softmax(jnp.where(jnp.arange(vocabulary) < most, ordered, -jnp.inf), axis=-1)
    before = jnp.cumsum(share, axis=-1) - share
    enough = jnp.where(rows.top_p < 1, rows.top_p, jnp.inf)[:, None]
    kept = jnp.clip(jnp.sum(before < enough, axis=-1, keepdims=True), 1, most)  # at least 1: top_p may round to 0
    return jnp.where(rank < kept, scaled, -jnp.inf)
