"""A folder that holds a model as Orbax checkpoints: what can be known of it without reading an array.

    config.json                  as HF has it
    tokenizer.json, ...          in HF layout, if the model has a tokenizer
    mooncake_checkpoint.json     format, dtype of the arrays, SHA-256 that tells models apart
    embedder/, layer_000/, ...   one Orbax checkpoint for each part, with checksums beside it

A part is a checkpoint of its own so that saving never holds more than one beside the model itself, and a pipeline stage
reads only its layers. orbax_arrays.py writes the arrays, checkpoint_arrays.py reads them. Knows nothing of JAX.
"""

import json
from pathlib import Path

from mooncake_jax.errors import UsageError
from mooncake_jax.model.config import DTYPE_BYTES, LlamaConfig
from mooncake_jax.model.files import read_json
from mooncake_jax.model.tokenizer import Tokenizer

_ABOUT = "mooncake_checkpoint.json"
_FORMAT = 2


class CheckpointFolder:
    """Raises UsageError for a folder whose description is damaged, naming the file."""

    def __init__(self, folder: Path):
        self.origin = str(folder)
        self.folder = folder
        path = folder / _ABOUT
        about = read_json(path)
        self._config = LlamaConfig.from_hf(read_json(folder / "config.json"), str(folder / "config.json"))
        if about.get("format") != _FORMAT:
            raise UsageError(f"{path}: format is {about.get('format')!r}, not {_FORMAT}; convert the model again")
        if about.get("dtype") not in DTYPE_BYTES:
            raise UsageError(f"{path}: dtype is {about.get('dtype')!r}; convert the model again")
        self.dtype: str = about["dtype"]
        try:
            self._identity = bytes.fromhex(about["sha256"])
        except (KeyError, TypeError, ValueError):
            raise UsageError(f"{path}: sha256 is {about.get('sha256')!r}; convert the model again") from None

    def config(self) -> LlamaConfig:
        return self._config

    def tokenizer(self) -> Tokenizer | None:
        return Tokenizer.from_folder(self.folder)

    def identity(self) -> bytes:
        """What was given when it was written, so that no rank needs to read all the arrays."""
        return self._identity


def is_checkpoint(folder: Path) -> bool:
    """Whether folder holds a model in this format, whole or damaged."""
    return (folder / _ABOUT).is_file()


def describe(folder: Path, config: LlamaConfig, dtype: str, identity: bytes, tokenizer: Tokenizer | None) -> None:
    """Writes all but the arrays."""
    if tokenizer is not None:
        tokenizer.save(folder)
    (folder / "config.json").write_text(json.dumps(config.to_hf(), indent=2) + "\n")
    about = {"format": _FORMAT, "dtype": dtype, "sha256": identity.hex()}
    (folder / _ABOUT).write_text(json.dumps(about, indent=2) + "\n")


def part_folder(folder: Path, part: tuple) -> Path:
    """Where a part lies: ("embedder",) or ("layers", number)."""
    return folder / (part[0] if len(part) == 1 else f"layer_{part[1]:03d}")
