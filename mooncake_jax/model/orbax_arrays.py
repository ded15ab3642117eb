"""The arrays of a checkpoint folder (checkpoint.py), written and read by Orbax, part by part."""

from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from mooncake_jax.errors import UsageError
from mooncake_jax.model.checkpoint import CheckpointFolder, part_folder
from mooncake_jax.model.llama import Params
from mooncake_jax.model.placement import Part, leaf_name, place

# Arrays are stored in chunks of at most this size, so that a device's slice costs little more than its own bytes.
_CHUNK_BYTES = 16 << 20


class CheckpointReader:
    """Reads parts of one model. Raises UsageError naming arrays that are missing, extra or misshapen, or the part that
    is damaged.
    """

    def __init__(self, source: CheckpointFolder):
        self._folder = source.folder

    def read(self, part: Part, abstract: Params) -> Params:
        """The part's parameters, placed and in dtype as abstract says."""
        path = part_folder(self._folder, part)
        try:
            with ocp.StandardCheckpointer() as checkpointer:
                _check(path, checkpointer.metadata(path.absolute()).item_metadata.tree, abstract)
                restored = checkpointer.restore(path.absolute(), jax.tree.map(_target, abstract))
        except UsageError:
            raise
        except Exception as error:  # Orbax and TensorStore report damage in a dozen ways
            detail = str(error).strip().partition("\n")[0][:200]
            raise UsageError(
                f"{path}: not a whole Orbax checkpoint ({type(error).__name__}: {detail}); convert the model again"
            ) from None
        return jax.tree.map(_finish, abstract, restored)


def write_part(folder: Path, part: Part, parameters: Params) -> None:
    """Writes one part into folder, and returns when it is on disk."""
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), parameters)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(part_folder(folder, part).absolute(), parameters, save_args=save_args)


def _target(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct | np.ndarray:
    """What Orbax is to restore: without a sharding, a NumPy array, since it would else ask for the devices of old."""
    return leaf if leaf.sharding is not None else np.empty(leaf.shape, leaf.dtype)


def _finish(wanted: jax.ShapeDtypeStruct, restored: jax.Array | np.ndarray) -> jax.Array:
    return restored if isinstance(restored, jax.Array) else place(wanted, restored.__getitem__)


def _check(path: Path, stored: Params, abstract: Params) -> None:
    found, wanted = (
        {leaf_name(keys): tuple(leaf.shape) for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (stored, abstract)
    )
    for what, names in (("missing", wanted.keys() - found.keys()), ("unknown", found.keys() - wanted.keys())):
        if names:
            raise UsageError(f"{path}: arrays {what}: {', '.join(sorted(names))}; convert the model again")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise UsageError(
                f"{path}: {name} has shape {list(found[name])}, the config asks for {list(shape)}; "
                "convert the model again"
            )
