"""How the SSD tier's blocks lie on disk: whose they are, and the header that every slot begins with.

Bytes and names only: ssd_array.py reads and writes them, ssd_folder.py knows the folder around them.
"""

import hashlib
import json
import re
import struct
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import xxhash

from mooncake_jax.cache.keys import KEY_BYTES
from mooncake_jax.cache.layout import BlockLayout

VERSION = 2
INDEX_BITS = 60  # TensorStore takes larger array shapes for infinite ones
METADATA = "zarr.json"
READS = "reads"  # how often blocks have been read (ssd_reads.py)
UNFINISHED = ".__lock"  # ends the names of what is being written, by TensorStore too
ATTRIBUTES = "mooncake_jax"  # of the metadata: whose blocks these are
MODEL_NAME = re.compile(r"[0-9a-f]{32}")  # of a model's folder
_MAGIC = b"KVCBLOCK"
# magic, version, layers, key, parent (zeros: none), model, time written, checksum of all the rest
_FIELDS = struct.Struct(f"<8sII{KEY_BYTES}s{KEY_BYTES}s32sQQ")
_ALIGNMENT = 64


class SlotMissing(Exception):
    """There is no such slot, or it holds another block."""


class SlotDamaged(Exception):
    """The slot is there and not what was written."""


class SlotFailed(Exception):
    """The system refused to read or write."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """Whose blocks they are: fingerprint of the model as in block keys, the layout of what is kept of each, and the
    model's layer that this begins with.
    """

    fingerprint: bytes
    layout: BlockLayout
    first_layer: int = 0

    @property
    def whole(self) -> tuple:
        """Equal for all parts of the same blocks."""
        one = self.layout
        return (self.fingerprint, one.tokens, one.kv_heads, one.head_dim, one.dtype)

    @property
    def digest(self) -> bytes:
        """32 bytes, different for every fingerprint, layout and version of the format."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).digest()

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.digest[:16].hex()

    @property
    def header_bytes(self) -> int:
        return -(-(_FIELDS.size + 8 * self.layout.layers) // _ALIGNMENT) * _ALIGNMENT

    @property
    def row_bytes(self) -> int:
        return self.header_bytes + self.layout.nbytes // self.layout.layers

    @property
    def slot_bytes(self) -> int:
        """Of a slot's file: the rows and the shard's index, offset and size of each and a CRC."""
        return self.layout.layers * (self.row_bytes + 16) + 4

    def to_json(self) -> dict:
        return {
            "version": VERSION,
            "fingerprint": self.fingerprint.hex(),
            "layout": asdict(self.layout),
            "first_layer": self.first_layer,
        }

    @classmethod
    def of_folder(cls, folder: Path) -> "StoredModel | None":
        """Whose blocks a folder holds; None if that cannot be told."""
        try:
            fields = json.loads((folder / METADATA).read_bytes())["attributes"][ATTRIBUTES]
            model = cls(bytes.fromhex(fields["fingerprint"]), BlockLayout(**fields["layout"]), fields["first_layer"])
            return model if model.name == folder.name else None
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ZeroDivisionError):
            return None


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """What a slot says of its block. sums: XXH3 of each layer's K and V, uint64 [layers]."""

    key: bytes
    parent: bytes | None
    written_ns: int  # since 1970
    sums: np.ndarray

    def pack(self, model: StoredModel) -> bytes:
        fields = (_MAGIC, VERSION, len(self.sums), self.key, self.parent or bytes(KEY_BYTES), model.digest)
        sums = self.sums.astype("<u8").tobytes()
        check = xxhash.xxh3_64_intdigest(_FIELDS.pack(*fields, self.written_ns, 0) + sums)
        return _FIELDS.pack(*fields, self.written_ns, check) + sums

    @classmethod
    def unpack(cls, raw: bytes, model: StoredModel) -> "Header":
        """Raises SlotDamaged if this is no header of this model."""
        magic, version, layers, key, parent, digest, written_ns, check = _FIELDS.unpack_from(raw)
        end = _FIELDS.size + 8 * model.layout.layers
        cleared = raw[: _FIELDS.size - 8] + bytes(8) + raw[_FIELDS.size : end]
        if magic != _MAGIC or check != xxhash.xxh3_64_intdigest(cleared):
            raise SlotDamaged("its header does not match its checksum")
        if (version, layers, digest) != (VERSION, model.layout.layers, model.digest):
            raise SlotDamaged("its header is another model's")
        sums = np.frombuffer(raw[_FIELDS.size : end], "<u8").astype(np.uint64)
        return cls(key, parent if any(parent) else None, written_ns, sums)


def slot_index(key: bytes) -> int:
    """The slot of a block; blocks whose keys differ only after INDEX_BITS bits share it."""
    return int.from_bytes(key[:8], "big") >> (64 - INDEX_BITS)
