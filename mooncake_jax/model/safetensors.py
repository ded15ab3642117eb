"""Weights and configuration from a Hugging Face folder: config.json and safetensors, in one file or in shards with an
index.

Tensors are read one by one. Knows nothing of JAX.
"""

import json
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy, without which safetensors cannot return such a tensor
import numpy as np
from safetensors import SafetensorError, safe_open

from mooncake_jax.errors import UsageError
from mooncake_jax.model.config import LlamaConfig

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class SafetensorsSource:
    """A WeightSource (sources.py) over a folder. Raises UsageError for a missing or broken file, naming it."""

    def __init__(self, folder: Path):
        self.origin = str(folder)
        self._config = LlamaConfig.from_hf(_read_json(folder / "config.json"), str(folder / "config.json"))
        self.files = _weight_files(folder)
        self._shards = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in self.files:
            shard = _open(path)
            for name in shard.keys():
                self._shards[name] = shard
                self.shapes[name] = tuple(shard.get_slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        """One tensor in the dtype it is stored in; the caller owns the memory."""
        return self._shards[name].get_tensor(name)

    def config(self) -> LlamaConfig:
        return self._config


def _weight_files(folder: Path) -> tuple[Path, ...]:
    if not (folder / _INDEX).exists():
        return (folder / _SINGLE,)
    index = _read_json(folder / _INDEX)
    names = index.get("weight_map")
    if not isinstance(names, dict) or not names:
        raise UsageError(f"{folder / _INDEX}: no weight_map in it; fetch the model again")
    return tuple(folder / name for name in sorted(set(names.values())))


def _open(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"{path}: no such weight file; fetch the model again")
    try:
        return safe_open(path, framework="np")
    except SafetensorError as error:
        raise UsageError(f"{path}: not a whole safetensors file ({error}); fetch it again") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; a Hugging Face folder needs this file") from None
    except ValueError as error:
        raise UsageError(f"{path}: not JSON ({error}); fetch the model again") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path}: holds a {type(data).__name__}, not an object; fetch the model again")
    return data
