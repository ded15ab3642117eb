"""Which dtype computes faster on this machine, from a short measurement: what --dtype=auto means.

The machine decides, not the model: bfloat16 halves what is read, but where a CPU lacks instructions for it, or its
compiler their use, products take longer. Knows nothing of models and engines.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

DTYPES = ("float32", "bfloat16")
_PREFILL, _DECODING = (512, 576, 1536), (2, 576, 1536)  # rows, width and outputs of a small model's products
_WEIGHTS = 48  # so many different matrices that they come from memory, not from a cache
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """The dtype that is faster for a prefill and a decoding step alike weighed, and the seconds behind the choice.

    prefill_s and decoding_s are by dtype: medians of products with the same number of weights, of 512 rows and of two.
    """

    dtype: str
    prefill_s: dict[str, float]
    decoding_s: dict[str, float]

    def __str__(self) -> str:
        measured = "; ".join(
            f"{dtype}: prefill {self.prefill_s[dtype] * 1e3:.1f} ms, decoding {self.decoding_s[dtype] * 1e3:.1f} ms"
            for dtype in DTYPES
        )
        return f"{self.dtype} ({measured})"


def choose_dtype() -> DtypeChoice:
    """Measures for about a second, both dtypes in turns, and takes the one whose ratios multiply to less."""
    work = {(shape, dtype): _products(shape, dtype) for shape in (_PREFILL, _DECODING) for dtype in DTYPES}
    seconds = {key: [] for key in work}
    for _ in range(_REPEATS):
        for key, run in work.items():
            begun = time.perf_counter()
            run()
            seconds[key].append(time.perf_counter() - begun)
    median = {key: statistics.median(values) for key, values in seconds.items()}
    prefill, decoding = ({dtype: median[shape, dtype] for dtype in DTYPES} for shape in (_PREFILL, _DECODING))
    return DtypeChoice(faster(prefill, decoding), prefill, decoding)


def faster(prefill_s: dict[str, float], decoding_s: dict[str, float]) -> str:
    """The dtype with the least product of both times; float32, which is exact, if they are equal."""
    return min(DTYPES, key=lambda dtype: prefill_s[dtype] * decoding_s[dtype])


def _products(shape: tuple[int, int, int], dtype: str) -> Callable[[], object]:
    """A warmed-up call that multiplies rows with _WEIGHTS matrices one after the other."""
    rows, width, outputs = shape
    x = jnp.ones((rows, width), dtype)
    weights = [jnp.full((width, outputs), i / _WEIGHTS, dtype) for i in range(_WEIGHTS)]

    @jax.jit
    def multiply(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        for matrix in weights:
            x = jnp.dot(x, matrix, preferred_element_type=jnp.float32).astype(dtype)[:, :width] / width
        return x

    jax.block_until_ready(multiply(x, weights))
    return lambda: jax.block_until_ready(multiply(x, weights))
