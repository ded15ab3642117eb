"""Where every array of a model lies on a mesh of pipeline stages (pp) by tensor parallelism (tp): rules as data.

All stages run one program, so layers are kept in *slots*: slot i stacks the i-th layer of every stage, [pp, ...], and a
stage with fewer layers than another leaves its last slot unused. Within a stage heads, the MLP's width and the
vocabulary are cut over tp (each layer then sums its output twice). Both ends of the model lie on every stage: the first
one embeds, the last one has the head, and either may be read from a tied embedding. Knows nothing of weights' values.

Legend: N pages, S context tokens, K KV heads, D head dim.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.model.llama import Params, abstract_parts
from mooncake_jax.model.placement import leaf_name
from mooncake_jax.parallel.mesh import PP, TP, MeshShape

# Path of a parameter -> how it is cut. Kernels are [in, out]; everything of a layer has its stage in front.
PARAMETER_RULES = (
    (r"embedder/embedding", P(TP, None)),
    (r"embedder/head", P(None, TP)),
    (r"embedder/norm/scale", P(None)),
    (r"layer/(attention|mlp)_norm/scale", P(PP, None)),
    (r"layer/attention/[qkv]/kernel", P(PP, None, TP)),
    (r"layer/attention/o/kernel", P(PP, TP, None)),
    (r"layer/mlp/(gate|up)/kernel", P(PP, None, TP)),
    (r"layer/mlp/down/kernel", P(PP, TP, None)),
)
ACTIVATIONS = P(PP, None, None)  # [pp, T, E]
PREFILL_KV = P(PP, None, None, TP, None)  # [pp, 2, S, K, D]
PAGES = P(PP, None, None, None, TP, None)  # [pp, N, 2, page, K, D]


def parameter_spec(path: str) -> P:
    """The rule for a parameter: embedder/... as Embedder names it, layer/... as LlamaLayer does.

    Raises ValueError unless exactly one rule fits: a parameter nobody thought of must not end up on every device.
    """
    fitting = [spec for pattern, spec in PARAMETER_RULES if re.fullmatch(pattern, path)]
    if len(fitting) != 1:
        raise ValueError(f"{len(fitting)} sharding rules fit the parameter {path}; there must be exactly one")
    return fitting[0]


@dataclass(frozen=True, eq=False)
class StagedModel:
    """A model on a mesh as jitted functions take it; leaves are arrays, or ShapeDtypeStructs with a sharding."""

    config: LlamaConfig
    dtype: jnp.dtype
    mesh: Mesh
    stages: tuple[range, ...]
    embedder_def: nnx.GraphDef
    layer_def: nnx.GraphDef
    embedder: Params
    slots: tuple[Params, ...]


def abstract_staged_model(config: LlamaConfig, dtype: jnp.dtype, mesh: Mesh) -> StagedModel:
    """The model without memory: every parameter a ShapeDtypeStruct with its sharding."""
    shape = MeshShape(mesh.shape[PP], mesh.shape[TP])
    stages = shape.stages(config.num_layers)
    parts = abstract_parts(config, dtype)
    return StagedModel(
        config=config,
        dtype=dtype,
        mesh=mesh,
        stages=stages,
        embedder_def=parts.embedder_def,
        layer_def=parts.layer_def,
        embedder=_shard(mesh, "embedder", parts.embedder, ()),
        slots=(_shard(mesh, "layer", parts.layer, (shape.pp,)),) * max(map(len, stages)),
    )


def sharded(mesh: Mesh, spec: P, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
    """An array without memory, cut by spec."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def device_bytes(tree: Any) -> int:
    """Bytes that one device holds of these arrays, abstract or not; all devices hold the same."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def _shard(mesh: Mesh, root: str, params: Params, front: tuple[int, ...]) -> Params:
    def one(path: tuple[jax.tree_util.DictKey, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = parameter_spec(f"{root}/{leaf_name(path)}")
        return sharded(mesh, spec, (*front, *leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(one, params)
