"""A model cut into pipeline stages over the devices of one instance, each process holding its own (paper section 5.1).

Legend: pp stages of tp devices each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.model.llama import abstract_parts
from mooncake_jax.model.loading import LoadedModel, load_model
from mooncake_jax.model.placement import EMBEDDER, Part, Placement, placed
from mooncake_jax.model.sources import Location, open_source
from mooncake_jax.parallel.mesh import MeshShape, make_mesh, stage_mesh
from mooncake_jax.parallel.sharding import parameter_spec


@dataclass(frozen=True, eq=False)
class PipelineModel:
    """held: the stages of which this process has devices, with the parameters of their layers, and of both ends for the
    first and the last stage. layers: those of every stage.
    """

    mesh: Mesh
    layers: tuple[range, ...]
    held: dict[int, LoadedModel]


def load_pipeline(
    location: Location, dtype: str, shape: MeshShape, devices: Sequence[jax.Device] | None = None
) -> PipelineModel:
    """Loads what this process holds of the model at location, stage by stage over devices (all of JAX's, if None).

    Raises UsageError if the model cannot be cut this way, there are too few devices, or the model cannot be loaded.
    """
    config = open_source(location).config()
    shape.check(config)
    mesh, layers = make_mesh(shape, devices), shape.stages(config.num_layers)
    held = {
        stage: load_model(location, dtype, _placement(stage_mesh(mesh, stage)), _parts(layers, stage))
        for stage in range(shape.pp)
        if any(device.process_index == jax.process_index() for device in mesh.devices[stage])
    }
    return PipelineModel(mesh, layers, held)


def abstract_pipeline(config: LlamaConfig, dtype: jnp.dtype, shape: MeshShape) -> PipelineModel:
    """A model without memory: what load_pipeline gives where one process holds all stages, but every parameter is a
    ShapeDtypeStruct with its sharding. Raises UsageError like load_pipeline.
    """
    shape.check(config)
    mesh, layers, parts = make_mesh(shape), shape.stages(config.num_layers), abstract_parts(config, dtype)
    held = {}
    for stage in range(shape.pp):
        placement = _placement(stage_mesh(mesh, stage))
        lying = {
            part: placed(part, parts.embedder if part == EMBEDDER else parts.layer, placement)
            for part in _parts(layers, stage)
        }
        embedder = lying.pop(EMBEDDER, None)
        held[stage] = LoadedModel(
            config, dtype, parts.embedder_def, parts.layer_def, embedder, tuple(lying.values()), tokenizer=None
        )
    return PipelineModel(mesh, layers, held)


def _parts(layers: tuple[range, ...], stage: int) -> list[Part]:
    ends: list[Part] = [EMBEDDER] if stage in (0, len(layers) - 1) else []
    return ends + [("layers", number) for number in layers[stage]]


def _placement(mesh: Mesh) -> Placement:
    """Parameters cut over the devices of one stage by the rules of sharding.py."""

    def place(part: Part, name: str, shape: tuple[int, ...]) -> NamedSharding:
        kind = "layer" if part[0] == "layers" else part[0]
        return NamedSharding(mesh, parameter_spec(f"{kind}/{name}"))

    return place
