"""One interface to weight files, and what can be known of a model without loading its weights.

A source names tensors as Hugging Face does and gives each in HF orientation ([out, in] for projections). Knows
nothing of JAX: a rank that only schedules needs a model's config, tokenizer and fingerprint, not its weights.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from mooncake_jax.errors import UsageError
from mooncake_jax.model.config import DTYPE_BYTES, LlamaConfig
from mooncake_jax.model.gguf import GGUFSource
from mooncake_jax.model.safetensors import SafetensorsSource
from mooncake_jax.model.tokenizer import Tokenizer


class WeightSource(Protocol):
    """Where weights come from. Reading changes nothing; every fault is a UsageError that names the file."""

    origin: str  # the file or folder, for errors
    files: tuple[Path, ...]  # the files that hold weights

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's shape by its HF name, without reading it."""

    def read(self, name: str) -> np.ndarray:
        """One tensor, dequantised; the caller owns the memory."""

    def config(self) -> LlamaConfig:
        """The model's shape."""


def open_source(path: Path) -> WeightSource:
    """A GGUF file or a folder in HF layout."""
    return SafetensorsSource(path) if path.is_dir() else GGUFSource(path)


def source_tokenizer(source: WeightSource) -> Tokenizer | None:
    """The tokenizer that a GGUF carries; None where there is none, or none that we can rebuild."""
    return Tokenizer.from_gguf(source.tokenizer_metadata()) if isinstance(source, GGUFSource) else None


def inspect_model(path: Path) -> tuple[LlamaConfig, Tokenizer | None]:
    """Config and tokenizer of the model at path, its weights unread."""
    source = open_source(path)
    return source.config(), source_tokenizer(source)


def model_fingerprint(path: Path, dtype: str) -> bytes:
    """32 bytes that differ between models, RoPE settings and dtypes: the root of every block key (DESIGN, rule 1)."""
    return source_fingerprint(open_source(path), dtype)


def source_fingerprint(source: WeightSource, dtype: str) -> bytes:
    """SHA-256 over the weight files' bytes, the config and the dtype."""
    if dtype not in DTYPE_BYTES:
        raise UsageError(f"dtype {dtype!r} is not known; use one of {', '.join(DTYPE_BYTES)}")
    whole = hashlib.sha256(f"{source.config()!r} {dtype}".encode())
    for path in source.files:
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.digest()
