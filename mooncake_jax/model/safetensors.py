"""Weights and configuration from a Hugging Face folder: config.json and safetensors, in one file or in shards with an
index.

Only the slices asked for are read. Knows nothing of JAX.
"""

import os
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy, without which safetensors cannot return such a tensor
import numpy as np
from safetensors import SafetensorError, safe_open

from mooncake_jax.errors import UsageError
from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.model.files import Index, files_digest, read_json, shown
from mooncake_jax.model.tokenizer import Tokenizer

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = ("F64", "F32", "F16", "BF16")  # integers and smaller floats mean nothing without the scales of a quantisation


class SafetensorsSource:
    """A WeightSource (sources.py) over a folder. Raises UsageError for a missing or broken file, naming it."""

    def __init__(self, folder: Path):
        self.origin = str(folder)
        self._folder = folder
        self._config = LlamaConfig.from_hf(read_json(folder / "config.json"), str(folder / "config.json"))
        self._files = _weight_files(folder)
        self._file_of: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in self._files:
            shard = _open(path)
            for name in shard.keys():
                self._file_of[name] = path
                self.shapes[name] = _shape(path, name, shard.get_slice(name))

    def read(self, name: str, index: Index) -> np.ndarray:
        """A tensor's slice in the dtype it is stored in; the caller owns the memory."""
        # Opened anew for every tensor, so that the mapped file's pages do not stay in this process.
        return _open(self._file_of[name]).get_slice(name)[index]

    def config(self) -> LlamaConfig:
        return self._config

    def tokenizer(self) -> Tokenizer | None:
        return Tokenizer.from_folder(self._folder)

    def identity(self) -> bytes:
        """SHA-256 over the weight files."""
        return files_digest(self._files)


def _weight_files(folder: Path) -> tuple[Path, ...]:
    if not (folder / _INDEX).exists():
        return (folder / _SINGLE,)
    index = read_json(folder / _INDEX)
    names = index.get("weight_map")
    if not isinstance(names, dict) or not names:
        raise UsageError(f"{folder / _INDEX}: no weight_map in it; fetch the model again")
    for name in names.values():
        if not isinstance(name, str) or not name or not name.isprintable() or Path(name).name != name:
            raise UsageError(
                f"{folder / _INDEX}: weight_map has {shown(name)}, which is no file's name; fetch the model again"
            )
    return tuple(folder / name for name in sorted(set(names.values())))


def _shape(path: Path, name: str, stored: Any) -> tuple[int, ...]:
    if stored.get_dtype() not in _DTYPES:
        raise UsageError(
            f"{path}: {name} is stored as {stored.get_dtype()}, not one of {', '.join(_DTYPES)}; "
            "use the model's unquantised weights, or a GGUF file"
        )
    return tuple(stored.get_shape())


def _open(path: Path) -> Any:
    if not os.path.isfile(path):  # Path's own test raises for a name that is too long for the file system
        raise UsageError(f"{path}: no such weight file; fetch the model again")
    try:
        return safe_open(path, framework="np")
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path}: not a whole safetensors file ({error}); fetch it again") from None
