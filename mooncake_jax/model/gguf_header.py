"""The head of a GGUF file: metadata, and where each tensor lies.

Reads little-endian versions 2 and 3. The gguf package parses it too, but makes several numpy arrays of every token of
the vocabulary: seconds that each rank would pay. Knows nothing of what the metadata mean.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: outermost dimension first, rows of row_bytes bytes from offset on."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    rows: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Metadata by key (numbers, texts, and lists of them), tensors by GGUF name."""

    fields: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> GGUFHeader:
    """Reads the head of the file at path. Raises ValueError saying what is wrong with a cut, damaged or foreign file,
    OSError if it cannot be read.
    """
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise ValueError("it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _read(_Cursor(data))
            except struct.error:
                raise ValueError("it ends within its metadata") from None


class _Cursor:
    """A place in the file that moves on with every value taken."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.at = 0

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def text(self) -> str:
        return self.texts(1)[0]

    def texts(self, count: int) -> list[str]:
        """A vocabulary has hundreds of thousands of them: this loop is what reading a header takes."""
        data, at, size, found = self.data, self.at, len(self.data), []
        for _ in range(count):
            (length,) = struct.unpack_from("<Q", data, at)
            end = at + 8 + length
            if end > size:
                raise ValueError("it ends within a text")
            found.append(data[at + 8 : end].decode())  # UnicodeDecodeError is a ValueError
            at = end
        self.at = at
        return found

    def array(self) -> list[Any]:
        kind, count = self.number("I"), self.number("Q")
        if count > len(self.data) - self.at:
            raise ValueError(f"an array of {count} values is longer than the file")
        if kind == _STRING:
            return self.texts(count)
        if kind == _ARRAY:
            return [self.array() for _ in range(count)]
        layout = f"<{count}{_scalar(kind)}"
        values = list(struct.unpack_from(layout, self.data, self.at))
        self.at += struct.calcsize(layout)
        return values

    def value(self) -> Any:
        kind = self.number("I")
        if kind == _STRING:
            return self.text()
        return self.array() if kind == _ARRAY else self.number(_scalar(kind))


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"its metadata has a value of unknown type {kind}")
    return _SCALARS[kind]


def _read(cursor: _Cursor) -> GGUFHeader:
    if cursor.data[:4] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    cursor.at = 4
    version = cursor.number("I")
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version}, not 2 or 3")
    tensors, fields = cursor.number("Q"), cursor.number("Q")
    metadata = {}
    for _ in range(fields):
        key = cursor.text()
        metadata[key] = cursor.value()
    found = [_tensor(cursor) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    return GGUFHeader(metadata, {name: _place(name, *where, start, len(cursor.data)) for name, *where in found})


def _tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape (outermost first), type and offset from the start of the tensors."""
    name, dimensions = cursor.text(), cursor.number("I")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise ValueError(f"{name} has {dimensions} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]
    return name, shape, cursor.number("I"), cursor.number("Q")


def _place(name: str, shape: tuple[int, ...], kind: int, offset: int, start: int, file_size: int) -> TensorInfo:
    try:
        kind = GGMLQuantizationType(kind)
    except ValueError:
        raise ValueError(f"{name} is of unknown type {kind}") from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise ValueError(f"{name} has rows of {shape[-1]}, not a multiple of {kind.name}'s {block}")
    info = TensorInfo(shape, kind, start + offset, math.prod(shape[:-1]), shape[-1] // block * block_bytes)
    if info.offset + info.rows * info.row_bytes > file_size:
        raise ValueError(f"it ends within {name}")
    return info
