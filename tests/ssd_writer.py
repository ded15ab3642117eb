"""Puts, rewrites and deletes blocks until it is killed. test_cache_ssd_long.py runs it and imports what both must know.

Arguments: folder, first number. Prints a line for each thing it has asked for, and one when it is done.
"""

import hashlib
import sys
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from mooncake_jax.cache.ssd import SSDStore
from mooncake_jax.cache.store import BlockLayout

LAYOUT = BlockLayout(layers=4, tokens=16, kv_heads=8, head_dim=64, dtype="bfloat16")  # 128 KiB
FINGERPRINT = b"a model that is killed"
CAPACITY = 1 << 28
KEPT = 40


def key_of(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def block_of(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 1 << 16, LAYOUT.shape, np.uint16)


def main() -> None:
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    store, pending = SSDStore(folder, LAYOUT, FINGERPRINT, CAPACITY), []

    def ask(what: str, which: int, future: Future) -> None:
        print(what, which, flush=True)
        pending.append((what, which, future))

    while True:
        ask("put", number, store.put(key_of(number), block_of(number)))
        if number % 3 == 1:
            ask("put", number - 1, store.put(key_of(number - 1), block_of(number - 1)))
        if number >= KEPT:
            print("delete", number - KEPT, flush=True)  # from now on it may be gone
            pending.append(("deleted", number - KEPT, store.delete(key_of(number - KEPT))))
        while len(pending) > 8:
            what, which, future = pending.pop(0)
            if what == "put":
                print(future.result().status, which, flush=True)
        number += 1


if __name__ == "__main__":
    main()
