"""The arrays of a checkpoint folder (checkpoint.py), written by Orbax, part by part.

checkpoint_arrays.py reads them, so that only those who write wait for Orbax's import.
"""

from pathlib import Path

import jax
import orbax.checkpoint as ocp

from mooncake_jax.model.checkpoint import part_folder
from mooncake_jax.model.checkpoint_arrays import BLOCK_BYTES, write_checksums
from mooncake_jax.model.llama import Params
from mooncake_jax.model.placement import Part


def write_part(folder: Path, part: Part, parameters: Params) -> None:
    """Writes one part into folder, and returns when it is on disk."""
    path = part_folder(folder, part)
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=BLOCK_BYTES), parameters)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path.absolute(), parameters, save_args=save_args)
    write_checksums(path, parameters)
