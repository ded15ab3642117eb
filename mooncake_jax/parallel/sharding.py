"""How every array of a model is cut over the devices of a pipeline: rules as data.

Within a stage heads, the MLP's width and the vocabulary are cut over tp; hidden states lie whole on every device, so a
layer sums its output twice. Over pp nothing is cut but what passes between stages. Knows nothing of weights' values.

Legend: pp stages, T tokens of a chunk, N pages, S context tokens, E width, K KV heads, D head dim.
"""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mooncake_jax.parallel.mesh import PP, TP

# Path of a parameter -> how it is cut over a stage's devices. Kernels are [in, out].
PARAMETER_RULES = (
    (r"embedder/embedding", P(TP, None)),
    (r"embedder/head", P(None, TP)),
    (r"embedder/norm/scale", P(None)),
    (r"layer/(attention|mlp)_norm/scale", P(None)),
    (r"layer/attention/[qkv]/kernel", P(None, TP)),
    (r"layer/attention/o/kernel", P(TP, None)),
    (r"layer/mlp/(gate|up)/kernel", P(None, TP)),
    (r"layer/mlp/down/kernel", P(TP, None)),
)
PREFILL_KV = P(None, None, TP, None)  # of a layer, [2, S, K, D]
PAGES = P(None, None, None, TP, None)  # of a layer, [N, 2, page, K, D]
BOUNDARY = P(PP, TP)  # hidden states between stages, [pp * T, E]: each device sends a part, and none twice


def parameter_spec(path: str) -> P:
    """The rule for a parameter: embedder/... as Embedder names it, layer/... as LlamaLayer does.

    Raises ValueError unless exactly one rule fits: a parameter nobody thought of must not end up on every device.
    """
    fitting = [spec for pattern, spec in PARAMETER_RULES if re.fullmatch(pattern, path)]
    if len(fitting) != 1:
        raise ValueError(f"{len(fitting)} sharding rules fit the parameter {path}; there must be exactly one")
    return fitting[0]


def sharded(mesh: Mesh, spec: P, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
    """An array without memory, cut by spec."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def device_bytes(tree: Any) -> int:
    """Bytes that one device holds of these arrays, abstract or not; all devices of a stage hold the same."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
