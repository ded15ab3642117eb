"""Block keys: what they depend on, and what they must not depend on."""

import hashlib
import os
import subprocess
import sys

import pytest

from mooncake_jax.cache.keys import block_keys, root_key

ROOT = root_key(b"model", 4)


def test_key_is_the_documented_hash():
    first = hashlib.sha256(ROOT + b"".join(i.to_bytes(8, "little") for i in (5, 6, 7, 8))).digest()
    second = hashlib.sha256(first + b"".join(i.to_bytes(8, "little") for i in (9, 1, 2, 3))).digest()
    assert block_keys([5, 6, 7, 8, 9, 1, 2, 3], 4, ROOT) == (first, second)


@pytest.mark.parametrize(("length", "keys"), [(0, 0), (3, 0), (4, 1), (5, 1), (7, 1), (8, 2)])
def test_only_full_blocks_have_keys(length, keys):
    assert len(block_keys(list(range(length)), 4, ROOT)) == keys


def test_keys_are_chained():
    a = block_keys([1, 2, 3, 4, 5, 6, 7, 8], 4, ROOT)
    b = block_keys([1, 2, 3, 9, 5, 6, 7, 8], 4, ROOT)
    assert a[0] != b[0]
    assert a[1] != b[1], "the second block has equal tokens but another prefix"


def test_no_linear_perturbation_collides():
    assert block_keys([100, 200, 3, 4], 4, ROOT) != block_keys([131, 199, 3, 4], 4, ROOT)


def test_root_depends_on_every_field():
    roots = {root_key(b"model", 4), root_key(b"other", 4), root_key(b"model", 8), root_key(b"model", 4, "tenant")}
    assert len(roots) == 4
    assert root_key(b"ab", 4, "c") != root_key(b"a", 4, "bc"), "fields must not run into one another"


@pytest.mark.parametrize("hash_seed", ["0", "1", "12345"])
def test_keys_are_equal_in_every_process(hash_seed):
    code = "from mooncake_jax.cache.keys import *; print(block_keys(range(40), 4, root_key(b'model', 4))[-1].hex())"
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == block_keys(range(40), 4, ROOT)[-1].hex()


def test_block_size_zero_is_refused():
    with pytest.raises(ValueError, match="block_size is 0"):
        block_keys([1, 2], 0, ROOT)
