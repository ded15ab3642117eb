"""The parts of a LLaMA layer in Flax NNX: RMS normalisation, rotary attention, gated MLP.

Kernels are stored [in, out]. Norms, rotary angles, scores and logits are computed in float32 whatever the weights'
dtype. The modules hold weights only: where keys and values are kept is the business of whoever passes `attend`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from mooncake_jax.model.config import LlamaConfig

# Given queries [T, H, D] and the new KV [2, T, K, D], stores the KV, attends, and returns [T, H, D].
Attend = Callable[[jax.Array, jax.Array], jax.Array]


class RMSNorm(nnx.Module):
    """Divides each row by its root mean square, then scales by a learnt weight."""

    def __init__(self, width: int, eps: float, dtype: jnp.dtype):
        self.scale = nnx.Param(jnp.ones((width,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return normed.astype(x.dtype) * self.scale[...]


def rotary_table(config: LlamaConfig, positions: jax.Array) -> jax.Array:
    """Cosines and sines of positions [T]: float32 [2, T, 1, D/2], the same for every head and layer."""
    angles = positions.astype(jnp.float32)[:, None, None] * config.rope_frequencies()
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)])


def rotate(x: jax.Array, rotary: jax.Array) -> jax.Array:
    """Turns heads x [T, heads, D] by rotary_table's angles, pairing dimension i with i + D/2 as HF does."""
    cos, sin = rotary
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class Projection(nnx.Module):
    """x [T, in] -> [T, out] without a bias, summed in float32."""

    def __init__(self, inputs: int, outputs: int, dtype: jnp.dtype):
        self.kernel = nnx.Param(jnp.zeros((inputs, outputs), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        # Asking for float32 also spares bfloat16 on JAX 0.10 a slow path on CPUs: decoding takes 3/5 of the time.
        return jnp.dot(x, self.kernel[...], preferred_element_type=jnp.float32).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype):
        query, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q = Projection(config.hidden_size, query, dtype)
        self.k = Projection(config.hidden_size, keys, dtype)
        self.v = Projection(config.hidden_size, keys, dtype)
        self.o = Projection(query, config.hidden_size, dtype)
        self.head_dim = config.head_dim

    def __call__(self, x: jax.Array, rotary: jax.Array, attend: Attend) -> jax.Array:
        """x [T, E], rotary as rotary_table gives it -> [T, E]."""
        heads = (x.shape[0], -1, self.head_dim)
        q = rotate(self.q(x).reshape(heads), rotary)
        kv = jnp.stack([rotate(self.k(x).reshape(heads), rotary), self.v(x).reshape(heads)])
        return self.o(attend(q, kv).reshape(x.shape[0], -1))


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype):
        self.gate = Projection(config.hidden_size, config.intermediate_size, dtype)
        self.up = Projection(config.hidden_size, config.intermediate_size, dtype)
        self.down = Projection(config.intermediate_size, config.hidden_size, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class LlamaLayer(nnx.Module):
    """One transformer layer, pre-normalised, with residuals."""

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype):
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = Attention(config, dtype)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, dtype)

    def __call__(self, x: jax.Array, rotary: jax.Array, attend: Attend) -> jax.Array:
        """x [T, E] -> [T, E]; rotary from rotary_table; attend keeps the KV and attends over it."""
        x = x + self.attention(self.attention_norm(x), rotary, attend)
        return x + self.mlp(self.mlp_norm(x))
