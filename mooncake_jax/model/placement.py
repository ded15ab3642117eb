"""Where parameters lie: a model's parts, their shardings, and arrays made from the slices that one process holds."""

import math
from collections.abc import Callable

import jax
import numpy as np

from mooncake_jax.model.files import Index
from mooncake_jax.model.llama import Params

# ("embedder",) or ("layers", number).
Part = tuple[str] | tuple[str, int]
EMBEDDER: Part = ("embedder",)
# Given a part, a parameter's path in it ("attention/q/kernel") and its shape: how it lies on the devices.
Placement = Callable[[Part, str, tuple[int, ...]], jax.sharding.Sharding]
_ALIGNMENT = 64  # bytes


def leaf_name(path: tuple) -> str:
    """A parameter's path within its part, from a path of jax.tree_util."""
    return "/".join(key.key for key in path)


def placed(part: Part, abstract: Params, placement: Placement | None) -> Params:
    """abstract with the shardings that placement gives its leaves; None leaves them to the default device."""
    if placement is None:
        return abstract

    def with_sharding(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = placement(part, leaf_name(path), leaf.shape)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(with_sharding, abstract)


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory that JAX on a CPU keeps as it is; it would copy what starts anywhere else."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def place(wanted: jax.ShapeDtypeStruct, piece: Callable[[Index], np.ndarray]) -> jax.Array:
    """An array placed as wanted says, from piece(index), which is called once for each slice that lies here.

    JAX may keep the very memory that piece returns. Waits for the transfer, so that pieces do not pile up on the host.
    """
    if wanted.sharding is None:
        # Not committed to a device: jitted functions then treat these arrays like those that they make themselves.
        return jax.block_until_ready(jax.device_put(piece((slice(None),) * len(wanted.shape))))
    pieces: dict[tuple, np.ndarray] = {}

    def once(index: Index) -> np.ndarray:
        key = tuple(one.indices(size) for one, size in zip(index, wanted.shape, strict=True))
        if key not in pieces:
            pieces[key] = piece(index)
        return pieces[key]

    return jax.block_until_ready(jax.make_array_from_callback(wanted.shape, wanted.sharding, once))
