"""Fills a Flax NNX LLaMA from a weight source, tensor by tensor, without ever holding the parameters twice."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mooncake_jax.errors import UsageError
from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.model.llama import Llama, abstract_llama
from mooncake_jax.model.sources import WeightSource

_LAYER = {
    ("attention_norm", "scale"): "input_layernorm",
    ("attention", "q", "kernel"): "self_attn.q_proj",
    ("attention", "k", "kernel"): "self_attn.k_proj",
    ("attention", "v", "kernel"): "self_attn.v_proj",
    ("attention", "o", "kernel"): "self_attn.o_proj",
    ("mlp_norm", "scale"): "post_attention_layernorm",
    ("mlp", "gate", "kernel"): "mlp.gate_proj",
    ("mlp", "up", "kernel"): "mlp.up_proj",
    ("mlp", "down", "kernel"): "mlp.down_proj",
}
_ENDS = {
    ("embedder", "embedding"): "model.embed_tokens.weight",
    ("embedder", "norm", "scale"): "model.norm.weight",
    ("embedder", "head"): "lm_head.weight",
}
_TRANSPOSED = ("kernel", "head")  # ours are [in, out], HF's [out, in]


def fill_llama(config: LlamaConfig, source: WeightSource, dtype: jnp.dtype) -> Llama:
    """The model with the source's weights in dtype.

    Raises UsageError naming the tensors that are missing, extra or misshapen.
    """
    graph, state = nnx.split(abstract_llama(config, dtype))
    parameters = dict(nnx.to_flat_state(state))
    _check(config, source, {_hf_name(path): _hf_shape(path, variable) for path, variable in parameters.items()})
    filled = [(path, variable.replace(_load(source, path, dtype))) for path, variable in parameters.items()]
    return nnx.merge(graph, nnx.from_flat_state(filled))


def _load(source: WeightSource, path: tuple, dtype: jnp.dtype) -> jax.Array:
    tensor = source.read(_hf_name(path))
    if path[-1] in _TRANSPOSED:
        tensor = tensor.T
    return jax.device_put(np.ascontiguousarray(tensor.astype(dtype, copy=False)))


def _hf_name(path: tuple) -> str:
    if path[0] == "layers":
        return f"model.layers.{path[1]}.{_LAYER[path[2:]]}.weight"
    return _ENDS[path]


def _hf_shape(path: tuple, variable: nnx.Variable) -> tuple[int, ...]:
    return variable.shape[::-1] if path[-1] in _TRANSPOSED else variable.shape


def _check(config: LlamaConfig, source: WeightSource, wanted: dict[str, tuple[int, ...]]) -> None:
    found = {name: shape for name, shape in source.shapes.items() if not _redundant(config, name)}
    for what, names in (
        ("missing", wanted.keys() - found.keys()),
        ("unknown to a llama", found.keys() - wanted.keys()),
    ):
        if names:
            listed = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise UsageError(
                f"{source.origin}: tensors {what}: {listed}; check that the config belongs to these weights"
            )
    for name, shape in wanted.items():
        if found[name] != shape:
            raise UsageError(
                f"{source.origin}: {name} has shape {list(found[name])}, the config asks for {list(shape)}; "
                "check that the config belongs to these weights"
            )


def _redundant(config: LlamaConfig, name: str) -> bool:
    """Tensors that some checkpoints carry although the config makes them: a tied head's copy, RoPE's frequencies."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")
