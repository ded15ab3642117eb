"""What all kinds of model files have in common. Knows nothing of JAX."""

import hashlib
import json
import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mooncake_jax.errors import UsageError

# What to read of a tensor: one slice of step 1 for each dimension.
Index = tuple[slice, ...]


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 60


def files_digest(paths: Iterable[Path]) -> bytes:
    """SHA-256 over the SHA-256 of each file's bytes. Raises UsageError naming a file that cannot be read."""
    return hashlib.sha256(b"".join(map(file_digest, paths))).digest()


def file_digest(path: Path) -> bytes:
    """SHA-256 of a file's bytes. Raises UsageError naming it if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; check the file") from None


def shown(value: Any) -> str:
    """What a file has as a value, for an error's one line: however long it is or deep, cut to a glance."""
    return _REPR.repr(value)


def read_json(path: Path) -> dict[str, Any]:
    """The object in the JSON file at path. Raises UsageError naming the file, and a key that has two values in it."""

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        for key, value in pairs:
            if value is not fields[key] and value != fields[key]:  # NaN differs from itself
                two = f"both {shown(value)} and {shown(fields[key])}"
                raise UsageError(f"{path}: {shown(key)} is {two}; correct the file or fetch the model again")
        return fields

    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=object_of)
        json.dumps(data, ensure_ascii=False).encode()  # half a surrogate pair is a text that nothing else can take
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; a model's folder needs this file") from None
    except RecursionError:
        raise UsageError(f"{path}: nested too deeply for a model's file; fetch the model again") from None
    except ValueError as error:
        raise UsageError(f"{path}: not JSON ({error}); fetch the model again") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path}: holds a {type(data).__name__}, not an object; fetch the model again")
    return data
