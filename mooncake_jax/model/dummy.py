"""Models of a known shape with random weights, as the paper's evaluation has them: for measuring, without their files.

The name of one is `dummy:NAME` or `dummy:NAME:SEED` with a NAME of architectures.py or a folder with a config.json; the
seed is 0 if left out. Says what such a model is; dummy_weights.py makes the weights. Knows nothing of JAX.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from mooncake_jax.errors import UsageError
from mooncake_jax.model.architectures import ARCHITECTURES
from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.model.files import read_json

PREFIX = "dummy:"
_MOST_SEED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class DummyModel:
    """An architecture and the seed of its weights."""

    shape: LlamaConfig
    seed: int

    @classmethod
    def parse(cls, name: str) -> "DummyModel":
        """From `dummy:NAME[:SEED]`. Raises UsageError for an unknown NAME or a SEED that is no number."""
        architecture, colon, seed = name.removeprefix(PREFIX), "", ""
        if not _is_known(architecture) and ":" in architecture:
            architecture, colon, seed = architecture.rpartition(":")
        shape = _shape(name, architecture)
        if colon and not (seed.isdecimal() and int(seed) <= _MOST_SEED):
            raise UsageError(f"model {name!r}: the seed is {seed!r}; use a whole number from 0 to {_MOST_SEED}")
        return cls(shape, int(seed or 0))

    def config(self) -> LlamaConfig:
        return self.shape

    def tokenizer(self) -> None:
        """Random weights have no use for text."""

    def identity(self) -> bytes:
        """Tells seeds apart; the shape is the config's business."""
        return hashlib.sha256(f"dummy weights, seed {self.seed}".encode()).digest()


def _is_known(architecture: str) -> bool:
    # os.path, because Path's own test raises for a name that is too long for the file system.
    return architecture in ARCHITECTURES or bool(architecture) and os.path.isfile(f"{architecture}/config.json")


def _shape(name: str, architecture: str) -> LlamaConfig:
    if architecture in ARCHITECTURES:
        return ARCHITECTURES[architecture]
    if _is_known(architecture):
        file = Path(architecture) / "config.json"
        return LlamaConfig.from_hf(read_json(file), str(file))
    raise UsageError(
        f"model {name!r}: no architecture {architecture!r} is known; use one of {', '.join(ARCHITECTURES)}, "
        "or a folder with a config.json"
    )
