"""The LLaMA model in Flax NNX: embedder and layers, and the split that jitted functions take.

A module is split once, after loading. From then on only graph definitions (static) and plain dictionaries of arrays
travel into jax.jit: traversing NNX modules at every step costs more than the step of a small model. Inside jit,
`nnx.merge` happens at tracing time only.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.model.layers import LlamaLayer, RMSNorm

Params = dict[str, Any]  # nested by submodule, arrays (or their shapes and dtypes) at the leaves


class Embedder(nnx.Module):
    """The two ends of the model: token embedding, and final norm with the head that turns hidden states into logits."""

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype):
        self.embedding = nnx.Param(jnp.zeros((config.vocab_size, config.hidden_size), dtype))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        tied = config.tie_word_embeddings
        self.head = None if tied else nnx.Param(jnp.zeros((config.hidden_size, config.vocab_size), dtype))

    def encode(self, ids: jax.Array) -> jax.Array:
        """Token ids [T] -> hidden states [T, E]."""
        return self.embedding[...][ids]

    def decode(self, x: jax.Array) -> jax.Array:
        """Hidden states [T, E] -> float32 logits [T, V]."""
        weights, axis = (self.embedding, 1) if self.head is None else (self.head, 0)
        contract = (((1,), (axis,)), ((), ()))
        return jax.lax.dot_general(self.norm(x), weights[...], contract, preferred_element_type=jnp.float32)


class Llama(nnx.Module):
    """The whole model. Holds weights; the engines in parallel/ run its parts."""

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype):
        self.embedder = Embedder(config, dtype)
        self.layers = nnx.List([LlamaLayer(config, dtype) for _ in range(config.num_layers)])


def abstract_llama(config: LlamaConfig, dtype: jnp.dtype) -> Llama:
    """A Llama whose parameters have shapes and dtypes but no memory."""
    return nnx.eval_shape(lambda: Llama(config, dtype))


@dataclass(frozen=True, eq=False)
class LlamaParts:
    """A model in two kinds of parts, split: graph definitions, and parameters without memory. All layers are equal."""

    embedder_def: nnx.GraphDef
    embedder: Params
    layer_def: nnx.GraphDef
    layer: Params


def abstract_parts(config: LlamaConfig, dtype: jnp.dtype) -> LlamaParts:
    """The parts of abstract_llama, without making every layer."""
    embedder_def, embedder = nnx.split(nnx.eval_shape(lambda: Embedder(config, dtype)))
    layer_def, layer = nnx.split(nnx.eval_shape(lambda: LlamaLayer(config, dtype)))
    return LlamaParts(embedder_def, nnx.to_pure_dict(embedder), layer_def, nnx.to_pure_dict(layer))
