"""One interface to models, wherever their weights come from, and what can be known of one without loading them.

A model is a GGUF file, a folder in HF layout, a folder of Orbax checkpoints, or a dummy. Knows nothing of JAX: a rank
that only schedules needs a model's config, tokenizer and fingerprint, not its weights.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from mooncake_jax.errors import UsageError
from mooncake_jax.model.checkpoint import CheckpointFolder, is_checkpoint
from mooncake_jax.model.config import DTYPE_BYTES, LlamaConfig
from mooncake_jax.model.dummy import DummyModel
from mooncake_jax.model.files import Index
from mooncake_jax.model.gguf import GGUFSource
from mooncake_jax.model.safetensors import SafetensorsSource
from mooncake_jax.model.tokenizer import Tokenizer

# Where a model is, as catalog.resolve gives it.
Location = Path | DummyModel


class ModelSource(Protocol):
    """A model that can be loaded. Reading changes nothing; every fault is a UsageError that names the file."""

    def config(self) -> LlamaConfig:
        """The model's shape."""

    def tokenizer(self) -> Tokenizer | None:
        """None if the model has none, or none that we can rebuild."""

    def identity(self) -> bytes:
        """32 bytes that differ where weights do."""


class WeightSource(ModelSource, Protocol):
    """Tensors named as Hugging Face does and in its orientation ([out, in] for projections)."""

    origin: str  # the file or folder, for errors

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's shape by its HF name, without reading it."""

    def read(self, name: str, index: Index) -> np.ndarray:
        """A tensor's slice, dequantised; reads little more than that, and the caller owns the memory."""


def open_source(location: Location) -> ModelSource:
    """The model at location, none of its weights read yet."""
    if isinstance(location, DummyModel):
        return location
    if is_checkpoint(location):
        return CheckpointFolder(location)
    return SafetensorsSource(location) if location.is_dir() else GGUFSource(location)


def inspect_model(location: Location) -> tuple[LlamaConfig, Tokenizer | None]:
    """Config and tokenizer of the model at location, its weights unread."""
    source = open_source(location)
    return source.config(), source.tokenizer()


def model_fingerprint(location: Location, dtype: str) -> bytes:
    """32 bytes that differ between models, RoPE settings and dtypes: the root of every block key (architecture.md,
    rule 1). Reads every byte of a GGUF or safetensors file.
    """
    return source_fingerprint(open_source(location), dtype)


def source_fingerprint(source: ModelSource, dtype: str) -> bytes:
    """SHA-256 over the weights' identity, the config and the dtype."""
    check_dtype(dtype)
    return hashlib.sha256(f"{source.config()!r} {dtype}".encode() + source.identity()).digest()


def check_dtype(dtype: str) -> None:
    """Raises UsageError unless models can be loaded in this dtype."""
    if dtype not in DTYPE_BYTES:
        raise UsageError(f"dtype {dtype!r} is not known; use one of {', '.join(DTYPE_BYTES)}")
