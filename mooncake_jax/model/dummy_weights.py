"""Random weights by seed, made on the devices parameter by parameter.

Every parameter depends on the seed and its name alone, not on the mesh, the dtype (but for rounding) or the others.
Matrices keep the mean square of what they multiply, so that activations stay near 1 and bfloat16 never overflows.
"""

import functools
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from mooncake_jax.model.dummy import DummyModel
from mooncake_jax.model.llama import Params
from mooncake_jax.model.placement import Part, leaf_name


class DummyReader:
    """Makes parts of one dummy model."""

    def __init__(self, source: DummyModel):
        self._key = jax.random.key(source.seed)

    def read(self, part: Part, abstract: Params) -> Params:
        """The part's parameters, placed and in dtype as abstract says."""
        return jax.tree_util.tree_map_with_path(lambda path, leaf: self._make(part, leaf_name(path), leaf), abstract)

    def _make(self, part: Part, leaf: str, wanted: jax.ShapeDtypeStruct) -> jax.Array:
        name = "/".join(map(str, (*part, leaf)))
        inputs = wanted.shape[-1] if leaf == "embedding" else wanted.shape[0]
        bound = np.float32((3 / inputs) ** 0.5)  # of a uniform distribution with variance 1 / inputs
        key = jax.random.fold_in(self._key, zlib.crc32(name.encode()))
        return _maker(wanted.shape, wanted.dtype, wanted.sharding)(key, bound)


@functools.cache
def _maker(shape: tuple[int, ...], dtype: jnp.dtype, sharding: jax.sharding.Sharding | None) -> Callable:
    """Compiled once for each kind of parameter, not for each layer."""

    def make(key: jax.Array, bound: jax.Array) -> jax.Array:
        if len(shape) == 1:  # a norm's scale
            return jnp.ones(shape, dtype)
        # Uniform, because it takes no transcendental function whose last bit could depend on how the array is split.
        return (jax.random.uniform(key, shape, jnp.float32, -1, 1) * bound).astype(dtype)

    return jax.jit(make, out_shardings=sharding)
