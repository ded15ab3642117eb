"""The two ranks of arxiv_fig07.py: rank 0 prefills and stores, rank 1 receives. Rank 0 prints its figures as JSON.

The engine, the block store, the layer-wise export and the messenger are those of the cluster. One core is kept for what
sends and receives, as accelerators leave a host its cores: otherwise storing would take them from the computation.
Arguments: model, model_dir, prefill_chunk, share, repeats, lengths.
"""

import json
import os
import statistics
import sys
import threading
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from mpi4py import MPI

from mooncake_jax.cache.messenger import Messenger
from mooncake_jax.cache.pool import Block
from mooncake_jax.cache.store import BlockLayout, BlockStore
from mooncake_jax.cache.transport import HostTransport
from mooncake_jax.cluster.export import Export
from mooncake_jax.model.catalog import resolve
from mooncake_jax.model.loading import load_model
from mooncake_jax.parallel.compiling import enable_compile_cache
from mooncake_jax.parallel.prefill import PrefillEngine
from mooncake_jax.request import Request
from mooncake_jax.sched.actions import RunPrefill

BLOCK = 64  # tokens
SENDING_DEADLINE_S, DEADLINE_S = 1800, 3600
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
SENDING, COMPUTING = CORES[-1:], CORES[:-1] or CORES


class Receiving:
    """What arrives goes into fresh memory, as in a decoding instance. The only message says that all is done."""

    def __init__(self, layout: BlockLayout):
        self._layout = layout
        self.done = threading.Event()

    def on_message(self, source, message) -> None:
        self.done.set()

    def place(self, source, header):
        shape = (header.tokens, self._layout.kv_heads, self._layout.head_dim)
        return [np.empty(shape, self._layout.raw) for _ in range(2)]

    def on_buffers(self, source, header, buffers) -> None: ...

    def on_broken(self, source, header, reason) -> None: ...

    def on_lost(self, rank: int) -> None: ...


class ToRankOne:
    """Links of the export, to the one other node there is."""

    transport = HostTransport()

    def __init__(self, messenger: Messenger):
        self._messenger = messenger

    def send_buffers(self, node: str, header, buffers) -> Future:
        return self._messenger.send_buffers(1, header, buffers)


class Experiment:
    def __init__(self, engine: PrefillEngine, vocabulary: int, layout: BlockLayout, longest: int):
        self.engine, self._layout, self._vocabulary = engine, layout, vocabulary
        self._store = BlockStore(-(-longest // BLOCK), layout)
        self._thread = ThreadPoolExecutor(1, "export", keep_to, (SENDING,))
        self._dispatch = 0

    def prompt(self, tokens: int) -> np.ndarray:
        return np.random.default_rng(tokens).integers(0, self._vocabulary, tokens)

    def computed(self, tokens: int) -> float:
        """Seconds of a prefill that stores nothing."""
        ids, begun = self.prompt(tokens), time.monotonic()
        self.engine.prefill(ids)
        return time.monotonic() - begun

    def seconds_a_token(self, tokens: int) -> float:
        """To compute so many of them, all that runs for the first time apart."""
        self.computed(tokens)
        return self.computed(tokens) / tokens

    def stored(self, tokens: int, links: ToRankOne, layer_wise: bool) -> float:
        """Seconds of a prefill that stores and sends its KVCache as it comes, or all of it in the end."""
        ids, export, kept = self.prompt(tokens), self._export(tokens, links), []
        begun = time.monotonic()
        self.engine.prefill(ids, on_layer=export.on_layer if layer_wise else lambda *piece: kept.append(piece))
        for piece in kept:
            export.on_layer(*piece)
        export.finish(SENDING_DEADLINE_S)
        return time.monotonic() - begun

    def _export(self, tokens: int, links: ToRankOne) -> Export:
        self._dispatch += 1
        blocks = tuple(Block(bytes([0]), slot) for slot in range(tokens // BLOCK))
        self._store.claim(blocks)
        everything = frozenset(range(len(blocks)))
        run = RunPrefill(self._dispatch, Request("", 0.0, tokens, 1), "decode0", blocks, 0, tuple(everything))
        return Export(run, 0, everything, self._store, 0, links, self._thread)


def keep_to(cores: list[int]) -> None:
    """The calling thread, and those that it starts. Nothing where the system knows no such thing."""
    if cores:
        os.sched_setaffinity(0, cores)


def main(model: str, model_dir: str, chunk: str, share: str, repeats: str, *lengths: str) -> None:
    comm, tokens = MPI.COMM_WORLD, [int(length) for length in lengths]
    own = COMPUTING if comm.rank == 0 else SENDING
    keep_to(own)
    enable_compile_cache(Path(model_dir) / "compiled")
    loaded = load_model(resolve(model, Path(model_dir)), "float32")
    config = loaded.config
    layout = BlockLayout(config.num_layers, BLOCK, config.num_kv_heads, config.head_dim, "float32")
    experiment, gbps = None, None
    if comm.rank == 0:
        experiment = Experiment(PrefillEngine(loaded, int(chunk)), config.vocab_size, layout, max(tokens))
        experiment.engine.warm_up(max(tokens))
        gbps = layout.bytes_per_token * 8e-9 / (float(share) * min(map(experiment.seconds_a_token, tokens)))
    del loaded
    gbps = receive_quietly(comm, gbps)
    receiving = Receiving(layout)
    messenger = Messenger(comm, receiving)
    messenger.limit(gbps)
    keep_to(SENDING)
    messenger.start()
    keep_to(own)
    if experiment is not None:
        figures = measure(experiment, ToRankOne(messenger), tokens, int(repeats))
        messenger.send(1, "done").result(SENDING_DEADLINE_S)
        print(
            json.dumps({"link_gbps": gbps, "bytes_per_token": layout.bytes_per_token, "lengths": figures}), flush=True
        )
    elif not receiving.done.wait(DEADLINE_S):  # without MPI, whose waiting takes a core from the other rank
        raise TimeoutError(f"rank 0 is not done after {DEADLINE_S} s")
    messenger.close()


def receive_quietly(comm: MPI.Comm, value: float | None) -> float:
    """Rank 0's value; MPI's own waiting would take a core from what rank 0 measures before it sends."""
    if comm.rank == 0:
        comm.send(value, 1)
        return value
    while not comm.iprobe(0):
        time.sleep(0.01)
    return comm.recv(source=0)


def measure(experiment: Experiment, links: ToRankOne, tokens: list[int], repeats: int) -> dict[int, dict[str, float]]:
    """By length the median seconds of each way, measured in turns."""
    figures = {}
    for length in tokens:
        ways = {
            "computed": lambda length=length: experiment.computed(length),
            "serialized": lambda length=length: experiment.stored(length, links, layer_wise=False),
            "layer-wise": lambda length=length: experiment.stored(length, links, layer_wise=True),
        }
        turns = [{way: run() for way, run in ways.items()} for _ in range(repeats)]
        figures[length] = {way: statistics.median(turn[way] for turn in turns) for way in ways}
        print(f"{length} tokens: {figures[length]}", file=sys.stderr, flush=True)
    return figures


try:
    main(*sys.argv[1:])
except BaseException:
    traceback.print_exc()
    MPI.COMM_WORLD.Abort(1)  # the other rank would wait for this one
