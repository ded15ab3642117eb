"""A model ready for the engines: graph definitions and plain parameter dictionaries, split once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx

from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.model.sources import open_source, source_fingerprint, source_tokenizer
from mooncake_jax.model.tokenizer import Tokenizer
from mooncake_jax.model.weights import fill_llama

Params = dict[str, Any]  # nested by submodule, arrays at the leaves


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """What engines share. `nnx.merge(layer_def, layers[i])` is layer i: all have one definition and equal shapes."""

    config: LlamaConfig
    dtype: jnp.dtype
    embedder_def: nnx.GraphDef
    layer_def: nnx.GraphDef
    embedder: Params
    layers: tuple[Params, ...]
    tokenizer: Tokenizer | None
    fingerprint: bytes  # model_fingerprint


def load_model(path: Path, dtype: str) -> LoadedModel:
    """Loads a GGUF file or an HF folder as dtype, float32 or bfloat16. Raises UsageError naming what is wrong."""
    source = open_source(path)
    fingerprint = source_fingerprint(source, dtype)
    config = source.config()
    llama = fill_llama(config, source, jnp.dtype(dtype))
    embedder_def, embedder = nnx.split(llama.embedder)
    split_layers = [nnx.split(layer) for layer in llama.layers]
    return LoadedModel(
        config=config,
        dtype=jnp.dtype(dtype),
        embedder_def=embedder_def,
        layer_def=split_layers[0][0],
        embedder=nnx.to_pure_dict(embedder),
        layers=tuple(nnx.to_pure_dict(state) for _, state in split_layers),
        tokenizer=source_tokenizer(source),
        fingerprint=fingerprint,
    )
