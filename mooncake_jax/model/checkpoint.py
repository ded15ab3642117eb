"""A folder that holds a model as Orbax checkpoints: what can be known of it without reading an array.

    config.json                  as HF has it
    tokenizer.json, ...          in HF layout, if the model has a tokenizer
    mooncake_checkpoint.json     format, SHA-256 that tells models apart, SHA-256 of each file above
    embedder/, layer_000/, ...   one Orbax checkpoint for each part, with checksums beside it

A part is a checkpoint of its own so that saving never holds more than one beside the model itself, and a pipeline stage
reads only its layers. orbax_arrays.py writes the arrays, checkpoint_arrays.py reads them. Knows nothing of JAX.
"""

import json
from pathlib import Path
from typing import Any

from mooncake_jax.errors import UsageError
from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.model.files import file_digest, read_json, shown
from mooncake_jax.model.tokenizer import FILES as TOKENIZER_FILES
from mooncake_jax.model.tokenizer import Tokenizer

_ABOUT = "mooncake_checkpoint.json"
_FORMAT = 2
_DESCRIPTION = ("config.json", *TOKENIZER_FILES)
_REMEDY = "convert the model again"


class CheckpointFolder:
    """Raises UsageError for a folder whose description is damaged or was changed, naming the file."""

    def __init__(self, folder: Path):
        self.origin = str(folder)
        self.folder = folder
        path = folder / _ABOUT
        about = read_json(path)
        self._config = LlamaConfig.from_hf(read_json(folder / "config.json"), str(folder / "config.json"))
        if about.get("format") != _FORMAT:
            raise UsageError(f"{path}: format is {shown(about.get('format'))}, not {_FORMAT}; {_REMEDY}")
        self._identity = _identity(path, about.get("sha256"))
        _check_files(folder, about.get("files"))
        _check_layers(folder, self._config.num_layers)

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


def describe(folder: Path, config: LlamaConfig, identity: bytes, tokenizer: Tokenizer | None) -> None:
    """Writes all but the arrays."""
    if tokenizer is not None:
        tokenizer.save(folder)
    (folder / "config.json").write_text(json.dumps(config.to_hf(), indent=2) + "\n")
    about = {"format": _FORMAT, "sha256": identity.hex(), "files": _digests(folder)}
    (folder / _ABOUT).write_text(json.dumps(about, indent=2) + "\n")


def part_folder(folder: Path, part: tuple) -> Path:
    """Where a part lies: ("embedder",) or ("layers", number)."""
    return folder / (part[0] if len(part) == 1 else f"layer_{part[1]:03d}")


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 of the files that say what the arrays mean, by name; absent ones are left out."""
    return {name: file_digest(folder / name).hex() for name in _DESCRIPTION if (folder / name).is_file()}


def _identity(path: Path, text: Any) -> bytes:
    try:
        identity = bytes.fromhex(text)
    except (TypeError, ValueError):
        identity = b""
    if len(identity) != 32:
        raise UsageError(f"{path}: sha256 is {shown(text)}, not 32 bytes in hexadecimal; {_REMEDY}")
    return identity


def _check_files(folder: Path, written: Any) -> None:
    """A config or tokenizer other than the one written would make another model of the same arrays, silently."""
    if not isinstance(written, dict):
        raise UsageError(f"{folder / _ABOUT}: files is {shown(written)}, not an object; {_REMEDY}")
    found = _digests(folder)
    for name in _DESCRIPTION:
        if found.get(name) != written.get(name):
            raise UsageError(f"{folder / name}: not as it was written with the arrays; {_REMEDY}")


def _check_layers(folder: Path, layers: int) -> None:
    """A layer that is missing shows when it is read; one too many never would."""
    known = {part_folder(folder, ("layers", number)) for number in range(layers)}
    for path in sorted(folder.glob("layer_*")):
        if path not in known:
            raise UsageError(f"{path}: not of this model, which has {layers} layers; {_REMEDY}")
