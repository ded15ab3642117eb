"""A model cut into pipeline stages over the devices of one instance, each process holding its own (paper section 5.1).

Legend: pp stages of tp devices each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mooncake_jax.model.loading import LoadedModel, load_model
from mooncake_jax.model.placement import EMBEDDER, Part, Placement
from mooncake_jax.model.sources import Location, open_source
from mooncake_jax.parallel.mesh import PP, MeshShape, make_mesh, stage_mesh
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


def _parts(layers: tuple[range, ...], stage: int) -> list[Part]:
    ends: list[Part] = [EMBEDDER] if stage in (0, len(layers) - 1) else []
    return ends + [("layers", number) for number in layers[stage]]


def _placement(mesh: Mesh) -> Placement:
    """Parameters cut over the devices of one stage: the rules of sharding.py without the axis of stages."""

    def place(part: Part, name: str, shape: tuple[int, ...]) -> NamedSharding:
        kind = "layer" if part[0] == "layers" else part[0]
        spec = parameter_spec(f"{kind}/{name}")
        return NamedSharding(mesh, P(*(axis for axis in spec if axis != PP)))

    return place
