"""Measures the memory that loading a model takes: run by test_model_placement.py, or by hand with any model.

Arguments: a model, a dtype, and for one of two processes that share it the coordinator's address and its rank. Prints
bytes as JSON: share (of the model's arrays in this process), peak (of anonymous memory beyond what was there before;
pages of the mapped file, which the kernel can drop, are not counted).
"""

import json
import sys
import threading
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mooncake_jax.model.catalog import resolve
from mooncake_jax.model.loading import load_model


def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


class Peak(threading.Thread):
    """Looks at anonymous memory every half millisecond."""

    def __init__(self):
        super().__init__(daemon=True)
        self.bytes, self._over = 0, threading.Event()

    def run(self):
        while not self._over.wait(0.0005):
            self.bytes = max(self.bytes, anonymous())

    def stop(self):
        self._over.set()
        self.join()
        return max(self.bytes, anonymous())


def halves(part, name, shape):
    cut = (
        PartitionSpec("tp", None)
        if name.endswith(("embedding", "o/kernel", "down/kernel"))
        else PartitionSpec(None, "tp")
    )
    return NamedSharding(Mesh(np.array(jax.devices()), "tp"), PartitionSpec() if len(shape) == 1 else cut)


def main(model, dtype, address=None, rank=None):
    if address is not None:
        jax.distributed.initialize(address, num_processes=2, process_id=int(rank))
    location, placement = resolve(model), halves if address else None
    tiny = Path(__file__).parent / "data" / "tiny-llama2"
    load_model(tiny, dtype, placement)  # what code and threads take is there now
    before, peak = anonymous(), Peak()
    peak.start()
    loaded = load_model(location, dtype, placement)
    highest = peak.stop()
    leaves = jax.tree.leaves((loaded.embedder, loaded.layers))
    share = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    print(json.dumps({"share": share, "peak": highest - before}))


main(*sys.argv[1:])
