"""Choosing the next token from logits, the same way wherever and with whomever a request runs.

Legend: B batch, V vocabulary.
"""

import jax
import jax.numpy as jnp


def sample(logits: jax.Array, temperature: jax.Array, seed: jax.Array, index: jax.Array) -> jax.Array:
    """The next token of each row: logits float32 [B, V], temperature float32 [B], seed uint32 [B], index int32 [B] ->
    int32 [B].

    index counts the request's output tokens from 0. Temperature 0 takes the highest logit. The choice depends on
    nothing but the row's own four values, so it is the same in any batch and slot.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    drawn = jax.lax.cond(jnp.any(temperature > 0), _draw, lambda *_: greedy, logits, temperature, seed, index)
    return jnp.where(temperature > 0, drawn, greedy)


def _draw(logits: jax.Array, temperature: jax.Array, seed: jax.Array, index: jax.Array) -> jax.Array:
    """Gumbel-max: the highest of logits / temperature + Gumbel noise is a draw from their softmax."""
    noise = jax.vmap(lambda s, i: jax.random.gumbel(jax.random.fold_in(jax.random.key(s), i), logits.shape[1:]))(
        seed, index
    )
    safe = jnp.where(temperature > 0, temperature, 1.0)[:, None]
    return jnp.argmax(logits / safe + noise, axis=-1).astype(jnp.int32)
