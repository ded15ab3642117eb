"""A model ready for the engines: graph definitions and plain parameter dictionaries, split once."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

import jax.numpy as jnp
from flax import nnx

from mooncake_jax.model.checkpoint import CheckpointFolder
from mooncake_jax.model.checkpoint_arrays import CheckpointReader
from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.model.dummy import DummyModel
from mooncake_jax.model.dummy_weights import DummyReader
from mooncake_jax.model.llama import Params, abstract_parts
from mooncake_jax.model.placement import EMBEDDER, Part, Placement, placed
from mooncake_jax.model.sources import Location, ModelSource, check_dtype, open_source
from mooncake_jax.model.tokenizer import Tokenizer
from mooncake_jax.model.weights import TensorReader


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """What engines share. `nnx.merge(layer_def, layers[i])` is layer i: all have one definition and equal shapes.

    Of a model that is loaded in part, layers are those loaded, and embedder is None if it is not among the parts.
    """

    config: LlamaConfig
    dtype: jnp.dtype
    embedder_def: nnx.GraphDef
    layer_def: nnx.GraphDef
    embedder: Params | None
    layers: tuple[Params, ...]
    tokenizer: Tokenizer | None


class PartReader(Protocol):
    """Gives a model's parameters part by part."""

    def read(self, part: Part, abstract: Params) -> Params:
        """The part's parameters, placed and in dtype as abstract says. Raises UsageError naming what is wrong."""


def load_model(
    location: Location, dtype: str, placement: Placement | None = None, parts: Collection[Part] | None = None
) -> LoadedModel:
    """Loads the model at location (catalog.resolve) as dtype, float32 or bfloat16; only these parts, if given.

    placement says how each parameter lies on the devices; by default all lie on the first one. Host memory peaks at
    what this process's devices hold and one tensor more (for Orbax checkpoints a few MiB more, whatever the tensors'
    size); dummy weights take on the device what making the largest one needs. Raises UsageError naming what is wrong.
    """
    source = open_source(location)
    config = source.config()
    read = dict(read_parts(source, dtype, placement, parts))
    abstract = abstract_parts(config, jnp.dtype(dtype))
    return LoadedModel(
        config=config,
        dtype=jnp.dtype(dtype),
        embedder_def=abstract.embedder_def,
        layer_def=abstract.layer_def,
        embedder=read.pop(EMBEDDER, None),
        layers=tuple(read.values()),
        tokenizer=source.tokenizer(),
    )


def read_parts(
    source: ModelSource, dtype: str, placement: Placement | None = None, parts: Collection[Part] | None = None
) -> Iterator[tuple[Part, Params]]:
    """The model's embedder, then its layers in order, or those of them that are among parts, each read when it is asked
    for. Raises UsageError.
    """
    check_dtype(dtype)
    config, reader = source.config(), _reader(source)
    abstract = abstract_parts(config, jnp.dtype(dtype))
    for part in (EMBEDDER, *(("layers", number) for number in range(config.num_layers))):
        if parts is None or part in parts:
            shapes = abstract.embedder if part == EMBEDDER else abstract.layer
            yield part, reader.read(part, placed(part, shapes, placement))


def _reader(source: ModelSource) -> PartReader:
    match source:
        case DummyModel():
            return DummyReader(source)
        case CheckpointFolder():
            return CheckpointReader(source)
        case _:
            return TensorReader(source)
