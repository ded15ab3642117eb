"""What devices reach in products of large matrices: the peak that MFU is a share of where none is given.

Reached, not published: a share of this is higher than one of the maker's figure. Other processes that compute on the
same cores meanwhile make it lower. Knows nothing of models and engines.
"""

import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp

_SIZES = (256, 512, 1024, 2048, 4096)  # rows and columns; tried from the smallest on
_LONG_ENOUGH_S = 0.02  # for the start of a computation to be nothing beside it
_CHAIN = 4  # products, one after the other
_REPEATS = 3


def measure_peak(devices: Sequence[jax.Device], dtype: str) -> float:
    """FLOPs a second of these devices together, each computing on its own. Takes a fraction of a second."""
    rate = 0.0
    for size in _SIZES:
        work = [jax.device_put(jnp.full((size, size), 1 / size, dtype), device) for device in devices]
        jax.block_until_ready([_multiply(matrix) for matrix in work])  # compiles
        seconds = min(_seconds(work) for _ in range(_REPEATS))
        rate = max(rate, len(devices) * _CHAIN * 2 * size**3 / seconds)
        if seconds > _LONG_ENOUGH_S:
            break
    return rate


@jax.jit
def _multiply(matrix: jax.Array) -> jax.Array:
    product = matrix
    for _ in range(_CHAIN):
        product = product @ matrix
    return product


def _seconds(work: Sequence[jax.Array]) -> float:
    begun = time.perf_counter()
    jax.block_until_ready([_multiply(matrix) for matrix in work])
    return time.perf_counter() - begun
