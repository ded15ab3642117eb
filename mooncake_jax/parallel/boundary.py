"""What passes between the stages of a pipeline: activations, by one collective permute a tick (paper section 5.1).

All stages take part, whichever process holds them; a stage with nothing to pass on sends zeros. Knows nothing of layers
and schedules.

Legend: T tokens, E width.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mooncake_jax.parallel.mesh import PP, stage_mesh
from mooncake_jax.parallel.sharding import BOUNDARY

_MOST_UNDERWAY = 2  # passings that may be dispatched and not done, so that a new request need not wait behind many


class Boundary:
    """Between all stages of mesh, of which this process holds some; all processes call it alike."""

    def __init__(self, mesh: Mesh, held: Collection[int], width: int, dtype: jnp.dtype):
        self._mesh, self._held, self._width, self._dtype = mesh, sorted(held), width, dtype
        self._whole = NamedSharding(mesh, BOUNDARY)
        self._stage = {stage: NamedSharding(stage_mesh(mesh, stage), P()) for stage in held}
        self._permute = permute_program(mesh)
        self._fit = jax.jit(_fit, static_argnums=1)
        self._underway: deque[jax.Array] = deque()
        own = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
        # On CPUs the devices of a process share few threads. What waits for a passing may take them all, and keep from
        # it what it waits for itself: seen to hang with six devices.
        self._most_underway = 0 if len(own) > 1 and own[0].platform == "cpu" else _MOST_UNDERWAY

    def pass_on(self, outputs: Mapping[int, jax.Array], tokens: int) -> dict[int, jax.Array]:
        """What the stages held here receive, [tokens, E] by stage, of which the first gets zeros.

        outputs: hidden states by stage, [up to tokens, E], of those that have any; they are consumed.
        """
        pieces = []
        for stage in self._held:
            x = self._fit(outputs[stage], tokens) if stage in outputs else self.zeros(stage, tokens)
            pieces += self._by_device(stage, x)
        shape = (self._mesh.shape[PP] * tokens, self._width)
        whole = jax.make_array_from_single_device_arrays(shape, self._whole, pieces)
        received = self._permute(whole)
        self._underway.append(received)
        if len(self._underway) > self._most_underway:
            jax.block_until_ready(self._underway.popleft())
        own = {stage: self._by_device(stage, received) for stage in self._held}
        make = partial(jax.make_array_from_single_device_arrays, (tokens, self._width))
        return {stage: make(self._stage[stage], pieces) for stage, pieces in own.items()}

    def fit(self, x: jax.Array, tokens: int) -> jax.Array:
        """x [T, E] with its first tokens rows, or with zeros behind its own."""
        return self._fit(x, tokens)

    def zeros(self, stage: int, tokens: int) -> jax.Array:
        """Hidden states [tokens, E] on a stage's devices."""
        return jnp.zeros((tokens, self._width), self._dtype, device=self._stage[stage])

    def _by_device(self, stage: int, x: jax.Array) -> list[jax.Array]:
        """A stage's pieces of x, in the order of its devices; those of other processes are not among them."""
        pieces = {shard.device: shard.data for shard in x.addressable_shards}
        return [pieces[device] for device in self._mesh.devices[stage] if device in pieces]


def permute_program(mesh: Mesh) -> Callable:
    """Jitted: what all stages give, [pp * tokens, E] -> what each receives from the one before, zeros in the first."""
    following = [(stage, stage + 1) for stage in range(mesh.shape[PP] - 1)]
    permute = jax.shard_map(
        lambda x: jax.lax.ppermute(x, PP, following), mesh=mesh, in_specs=BOUNDARY, out_specs=BOUNDARY
    )
    return jax.jit(permute, donate_argnums=0)


def _fit(x: jax.Array, tokens: int) -> jax.Array:
    if x.shape[0] >= tokens:
        return x[:tokens]
    return jnp.pad(x, ((0, tokens - x.shape[0]), (0, 0)))
