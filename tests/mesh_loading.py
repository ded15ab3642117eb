"""Loads a model from every kind of source onto a mesh of four devices: run by test_model_placement.py, in a process of
its own because JAX fixes its number of devices at start.

Arguments: locations (paths; the empty one means a dummy). Prints how many parameters it compared.
"""

import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.model.dummy import DummyModel
from mooncake_jax.model.loading import load_model

DUMMY = DummyModel(LlamaConfig(320, 64, 176, 3, 8, 2, 8, 10000.0, None, 1e-5, False, 256), 3)
MESH = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def placement(part, name, shape):
    """Rows, columns, both or nothing: every kind of cut."""
    if name.endswith("scale"):
        spec = PartitionSpec()
    elif name == "embedding":
        spec = PartitionSpec("a")
    elif name in ("attention/q/kernel", "mlp/down/kernel"):
        spec = PartitionSpec(None, ("a", "b"))
    else:
        spec = PartitionSpec("b", "a")
    return NamedSharding(MESH, spec)


def compare(location, dtype):
    plain, cut = (load_model(location, dtype, where) for where in (None, placement))
    paths = jax.tree_util.tree_leaves_with_path((plain.embedder, plain.layers))
    for (path, a), b in zip(paths, jax.tree.leaves((cut.embedder, cut.layers)), strict=True):
        assert b.dtype == dtype and b.sharding.mesh == MESH, path
        assert "scale" in str(path) or b.addressable_shards[0].data.size <= b.size // 2, path
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=f"{location} {path}")
    return len(paths)


assert len(jax.devices()) == 4
print(sum(compare(Path(one) if one else DUMMY, dtype) for one in sys.argv[1:] for dtype in ("float32", "bfloat16")))
