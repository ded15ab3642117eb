"""What all kinds of model files have in common. Knows nothing of JAX."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mooncake_jax.errors import UsageError

# What to read of a tensor: one slice of step 1 for each dimension.
Index = tuple[slice, ...]


def files_digest(paths: Iterable[Path]) -> bytes:
    """SHA-256 over the SHA-256 of each file's bytes."""
    whole = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.digest()


def read_json(path: Path) -> dict[str, Any]:
    """The object in the JSON file at path. Raises UsageError naming the file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; a model's folder needs this file") from None
    except ValueError as error:
        raise UsageError(f"{path}: not JSON ({error}); fetch the model again") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path}: holds a {type(data).__name__}, not an object; fetch the model again")
    return data
