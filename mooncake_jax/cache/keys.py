"""Block keys: equal keys mean an equal whole prefix (report 3, FAST25 3.2.1).

The key of a full block is SHA-256 over (fingerprint, salt, parent key, the block's token ids). It is the same in
every process, on every platform and under any PYTHONHASHSEED. A partial last block has no key. Knows nothing of where
blocks are stored.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

KEY_BYTES = 32


def _field(value: bytes) -> bytes:
    """Length-prefixed, so that no two lists of fields serialise alike."""
    return len(value).to_bytes(8, "little") + value


def root_key(fingerprint: bytes, block_size: int, salt: str = "") -> bytes:
    """Parent of every first block: separates models, layouts, block sizes and tenants from one another."""
    fields = (b"mooncake-jax block v1", fingerprint, block_size.to_bytes(8, "little"), salt.encode())
    return hashlib.sha256(b"".join(map(_field, fields))).digest()


def block_keys(token_ids: Sequence[int], block_size: int, root: bytes) -> tuple[bytes, ...]:
    """Keys of the full blocks of a prompt, in order: len(token_ids) // block_size of them, 32 bytes each."""
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}: it must be at least 1")
    full = len(token_ids) // block_size
    ids = np.asarray(token_ids[: full * block_size], dtype="<i8").reshape(full, block_size)
    keys, parent = [], root
    for block in ids:
        parent = hashlib.sha256(parent + block.tobytes()).digest()
        keys.append(parent)
    return tuple(keys)
