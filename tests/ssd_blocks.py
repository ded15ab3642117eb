"""Small blocks for the tests of SSDStore, what stores, reads and checks them, and where their files are."""

import hashlib
import os
import resource
import shutil
import subprocess
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from mooncake_jax.cache.layout import BlockLayout
from mooncake_jax.cache.ssd import Result, SSDStore, Status
from mooncake_jax.cache.ssd_format import StoredModel, slot_index

LAYOUT = BlockLayout(layers=3, tokens=4, kv_heads=2, head_dim=32, dtype="bfloat16")
MODEL = b"fingerprint of a model"
MODEL_FOLDER = StoredModel(MODEL, LAYOUT).name
ROOMY = 1 << 24
ALL = range(LAYOUT.layers)
DONE = Result(Status.DONE)


def opened(folder, layout=LAYOUT, fingerprint=MODEL, capacity=ROOMY):
    return closing(SSDStore(folder, layout, fingerprint, capacity))


def key(number):
    return hashlib.sha256(b"%d" % number).digest()


def block(number, layout=LAYOUT):
    return np.random.default_rng(number).integers(0, 1 << 16, layout.shape, np.uint16)


def put(store, *numbers):
    for number in numbers:
        assert store.put(key(number), block(number)).result() == DONE


def read(store, number, layers=ALL):
    out = np.zeros((len(layers), *LAYOUT.shape[1:]), np.uint16)
    return store.read(key(number), layers, out).result(), out


def assert_readable(store, *numbers):
    for number in numbers:
        result, out = read(store, number)
        assert result == DONE and np.array_equal(out, block(number))


def file_of(folder, number):
    return folder / MODEL_FOLDER / f"c.{slot_index(key(number))}.0.0"


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def open_files():
    return len(os.listdir("/proc/self/fd"))


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@contextmanager
def tmpfs(folder, options):
    folder.mkdir()
    mounted = os.geteuid() == 0 and shutil.which("mount")
    done = mounted and subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True)
    if not done or done.returncode != 0:
        pytest.skip("mounting takes root and its rights")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(folder):
    """Somebody else takes what is left of the disk."""
    with pytest.raises(OSError, match="No space left"), (folder / "others").open("wb", buffering=0) as others:
        while True:
            others.write(bytes(1024))
