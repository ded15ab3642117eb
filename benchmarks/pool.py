"""How near the KVCache pool comes to the machine's limits: DRAM and SSD tier, prefix match, and transfers over MPI.

    python benchmarks/pool.py [--folder=.] [--repeats=15] [--json=FILE]

Blocks are of 20 MiB, 64 tokens of LLaMA2-70B in bfloat16, 80 layers. Checksums are made and verified within the times.
References are taken in the same run, in turns with what is compared: copies between warm arrays, plain files on that
disk, plain sends and receives. Rows are printed, and written, as they are measured: a run that is killed keeps them.
Whatever the figures are, the exit code is 0. The disk is that of --folder. It should be idle otherwise, and one whose
machine caches what it reads shows rates that no disk has.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
from absl import flags
from command import parse, run
from pool_ssd import ssd_rows
from pool_transfers import transfer_rows
from table import Row, at_least, at_most, interleaved, print_heads, print_row, row, write_json

from mooncake_jax.cache.layout import BlockLayout
from mooncake_jax.cache.pool import Block, KVCachePool
from mooncake_jax.cache.store import BlockStore
from mooncake_jax.errors import UsageError

FLAGS = flags.FlagValues()
flags.DEFINE_string("folder", ".", "on the disk that is to be measured; nothing stays in it", flag_values=FLAGS)
flags.DEFINE_integer("repeats", 15, "runs of which the median counts", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_string("json", None, "write the rows to this file too", flag_values=FLAGS)

LAYOUT = BlockLayout(layers=80, tokens=64, kv_heads=8, head_dim=128, dtype="bfloat16")
SLOTS = 8  # in turn, since a single block stays in the processor's cache
HELD, REQUEST = 200_000, 250  # blocks of all instances together, and of a request
INSTANCES = {16: at_most(50), 1000: at_most(1000)}  # and microseconds that a match may take
MATCHES = 200


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    with measured_folder(Path(FLAGS.folder)) as folder:
        rows: list[Row] = []
        print_heads()
        stores = chain(dram_rows(LAYOUT, FLAGS.repeats), ssd_rows(Path(folder), LAYOUT, FLAGS.repeats))
        for found in chain(stores, match_rows(), transfer_rows(FLAGS.repeats)):
            print_row(found)
            rows.append(found)
            if FLAGS.json:
                write_json(Path(FLAGS.json), rows)
    return 0


def measured_folder(parent: Path) -> tempfile.TemporaryDirectory:
    try:
        return tempfile.TemporaryDirectory(prefix="mooncake-pool-", dir=parent)
    except OSError as error:
        raise UsageError(
            f"--folder={parent}: {error.strerror}; name a folder that exists and can be written to"
        ) from None


def dram_rows(layout: BlockLayout, repeats: int) -> Iterator[Row]:
    store = BlockStore(SLOTS, layout)
    sources = [np.random.default_rng(slot).integers(0, 1 << 16, layout.shape, np.uint16) for slot in range(SLOTS)]
    targets = [np.ones(layout.shape, np.uint16) for _ in range(SLOTS)]
    blocks = [Block(bytes([slot]) * 32, slot) for slot in range(SLOTS)]

    def each(work: Callable[[int], object]) -> Callable[[], object]:
        return lambda: [work(slot) for slot in range(SLOTS)]

    work = {
        "memcpy": each(lambda slot: np.copyto(targets[slot], sources[slot])),
        "put": each(lambda slot: store.put(blocks[slot], sources[slot])),
        "get": each(lambda slot: store.get(blocks[slot], targets[slot])),
    }
    size, seconds = SLOTS * layout.nbytes / 1e9, interleaved(work, repeats)
    limit = size / seconds["memcpy"]
    yield row("memcpy", limit, "GB/s")
    for name in ("put", "get"):
        yield row(f"DRAM {name}, of memcpy's", size / seconds[name], "GB/s", limit, at_least(0.8))

    layer, heads = layout.layers // 2, slice(0, layout.kv_heads // 2)
    out = np.ones((2, *layout.shape[2:]), np.uint16)
    work = {
        "memcpy": each(lambda slot: np.copyto(targets[slot][layer], sources[slot][layer])),
        "put": each(lambda slot: store.write([slot], layer, sources[slot][layer][None])),
        "get": each(lambda slot: store.read([slot], layer, out=out)),
        "get of half the heads": each(lambda slot: store.read([slot], layer, heads, out[:, :, heads])),
    }
    seconds = interleaved(work, 10 * repeats)
    for name in list(work)[1:]:
        ours, theirs = (seconds[which] / SLOTS * 1e6 for which in (name, "memcpy"))
        yield row(f"DRAM {name}, a layer, of memcpy's", ours, "us", theirs)


def match_rows() -> Iterator[Row]:
    for instances, target in INSTANCES.items():
        name = f"match of {REQUEST} blocks over {instances} instances"
        yield row(name, match_seconds(instances, HELD) * 1e6, "us", target=target)


def match_seconds(instances: int, blocks: int) -> float:
    """Median of a match, where each instance has another part of the request's blocks, and what makes it full."""
    names, each = [f"prefill{number}" for number in range(instances)], blocks // instances
    pool, request = KVCachePool(dict.fromkeys(names, each)), keys(REQUEST)
    for number, name in enumerate(names):
        held = request[: min(REQUEST * (number + 1) // instances, each)]
        for chain_of_keys in (held, keys(each - len(held))):
            reserved = pool.reserve(name, chain_of_keys)
            pool.land(name, reserved)
            pool.release(name, reserved)
    seconds = []
    for _ in range(MATCHES):
        begun = time.perf_counter()
        pool.match(request)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def keys(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


if __name__ == "__main__":
    run(main)
