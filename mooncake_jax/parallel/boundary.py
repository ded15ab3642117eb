"""What passes between the stages of a pipeline: activations, by one collective permute a tick (paper section 5.1).

All stages take part, whichever process holds them; a stage with nothing to pass on sends zeros. Each device of a stage
sends its part of the width, so that nothing crosses twice, and a stage puts together what its devices have received.
Knows nothing of layers and schedules.

Legend: T tokens, E width.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mooncake_jax.parallel.mesh import PP, TP, stage_mesh
from mooncake_jax.parallel.sharding import BOUNDARY

_MOST_UNDERWAY = 2  # passings that may be dispatched and not done, so that a new request need not wait behind many


class Boundary:
    """Between all stages of mesh, of which this process holds some; all processes call it alike."""

    def __init__(self, mesh: Mesh, held: Collection[int], width: int, dtype: jnp.dtype):
        self._mesh, self._held, self._width, self._dtype = mesh, sorted(held), width, dtype
        self._all = NamedSharding(mesh, BOUNDARY)
        self._whole = {stage: NamedSharding(stage_mesh(mesh, stage), P()) for stage in held}
        self._cut = {stage: NamedSharding(stage_mesh(mesh, stage), P(None, TP)) for stage in held}
        self._permute = permute_program(mesh)
        self._fit_whole = {stage: fit_program(place) for stage, place in self._whole.items()}
        self._fit_cut = {stage: fit_program(place) for stage, place in self._cut.items()}
        self._underway: deque[jax.Array] = deque()
        own = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
        # On CPUs the devices of a process share few threads. What waits for a passing may take them all, and keep from
        # it what it waits for itself: seen to hang with six devices.
        self._most_underway = 0 if len(own) > 1 and own[0].platform == "cpu" else _MOST_UNDERWAY

    def pass_on(self, outputs: Mapping[int, jax.Array], tokens: int) -> dict[int, jax.Array]:
        """What the stages held here receive, [tokens, E] by stage and cut over its devices; the first gets zeros.

        outputs: hidden states by stage, [up to tokens, E], of those that have any; they are consumed.
        """
        pieces = []
        for stage in self._held:
            x = outputs[stage] if stage in outputs else self.zeros(stage, tokens)
            pieces += self._by_device(stage, self._fit_cut[stage](x, tokens))
        shape = (self._mesh.shape[PP] * tokens, self._width)
        received = self._permute(jax.make_array_from_single_device_arrays(shape, self._all, pieces))
        self._underway.append(received)
        if len(self._underway) > self._most_underway:
            jax.block_until_ready(self._underway.popleft())
        own = {stage: self._by_device(stage, received) for stage in self._held}
        make = partial(jax.make_array_from_single_device_arrays, (tokens, self._width))
        return {stage: make(self._cut[stage], pieces) for stage, pieces in own.items()}

    def whole(self, stage: int, received: jax.Array, tokens: int) -> jax.Array:
        """The first tokens rows of what a stage has received, on each of its devices."""
        return self._fit_whole[stage](received, tokens)

    def zeros(self, stage: int, tokens: int) -> jax.Array:
        """Hidden states [tokens, E] on a stage's devices."""
        return jnp.zeros((tokens, self._width), self._dtype, device=self._whole[stage])

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


def fit_program(place: NamedSharding) -> Callable:
    """Jitted: hidden states [T, E], tokens -> [tokens, E] in that place."""
    return jax.jit(_fit, static_argnums=1, out_shardings=place)


def _fit(x: jax.Array, tokens: int) -> jax.Array:
    """x [T, E] with its first tokens rows, or with zeros behind its own."""
    if x.shape[0] >= tokens:
        return x[:tokens]
    return jnp.pad(x, ((0, tokens - x.shape[0]), (0, 0)))
