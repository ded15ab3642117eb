"""The devices of one instance as a mesh of pipeline stages by tensor parallelism (paper section 5.1).

A stage holds contiguous layers on tp devices; activations pass from stage to stage. This module says which meshes a
model fits on and which layers a stage holds, and makes the mesh. Knows nothing of parameters, schedules or ranks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mooncake_jax.errors import UsageError
from mooncake_jax.model.config import LlamaConfig

if TYPE_CHECKING:
    import jax

PP, TP = "pp", "tp"  # the mesh's axes: pipeline stages, and the devices of a stage


@dataclass(frozen=True, slots=True)
class MeshShape:
    """pp stages of tp devices each."""

    pp: int
    tp: int

    @property
    def devices(self) -> int:
        return self.pp * self.tp

    def check(self, config: LlamaConfig, pp_flag: str | None = None) -> None:
        """Raises UsageError, naming the flag and its allowed values, unless the model can be cut this way.

        pp_flag: the flag that says pp, if it is not --pp.
        """
        if not 1 <= self.pp <= config.num_layers:
            flag, most = pp_flag or f"--pp={self.pp}", config.num_layers
            raise UsageError(f"{flag}: a stage holds at least one of the model's {most} layers; use 1 to {most} stages")
        allowed = tensor_parallel_sizes(config)
        if self.tp not in allowed:
            raise UsageError(
                f"--tp={self.tp}: it must divide the model's {config.num_kv_heads} KV heads, width "
                f"{config.hidden_size}, MLP width {config.intermediate_size} and vocabulary {config.vocab_size}; "
                f"use one of {', '.join(map(str, allowed))}"
            )

    def stages(self, num_layers: int) -> tuple[range, ...]:
        """The layers of each stage, in order: num_layers // pp, and one more in stages spread evenly among them."""
        return tuple(range(num_layers * s // self.pp, num_layers * (s + 1) // self.pp) for s in range(self.pp))


def tensor_parallel_sizes(config: LlamaConfig) -> tuple[int, ...]:
    """Every tp that cuts the model's KV heads, width, MLP and vocabulary into equal parts, ascending."""
    common = math.gcd(config.num_kv_heads, config.hidden_size, config.intermediate_size, config.vocab_size)
    return tuple(size for size in range(1, common + 1) if common % size == 0)


def make_mesh(shape: MeshShape, devices: "Sequence[jax.Device] | None" = None) -> "jax.sharding.Mesh":
    """A mesh with axes PP and TP over the first devices of these (all of JAX's, if None), stage by stage.

    Raises UsageError if there are too few.
    """
    import jax  # here, so that whoever only checks a shape starts no JAX

    devices = jax.devices() if devices is None else devices
    if len(devices) < shape.devices:
        raise UsageError(
            f"--pp={shape.pp} --tp={shape.tp} needs {shape.devices} devices, JAX has {len(devices)}; lower them"
        )
    # Auto: shard_map takes PP over by hand, and within a stage the compiler follows the parameters' shardings.
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((shape.pp, shape.tp), (PP, TP), axis_types=auto, devices=devices[: shape.devices])


def stage_mesh(mesh: "jax.sharding.Mesh", stage: int) -> "jax.sharding.Mesh":
    """The devices of one stage, over TP alone."""
    import jax

    return jax.sharding.Mesh(mesh.devices[stage], (TP,), axis_types=(jax.sharding.AxisType.Auto,))
