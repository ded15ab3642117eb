"""One process of benchmarks/pipeline.py: a stage of a pipeline, a share of tensor or sequence parallelism, or all of a
model. Started by it, pinned to one core; prints its figures as JSON.

Arguments: model, model_dir, way (cpp, tp, sp), process, processes, coordinator, prefill_chunk, repeats, network device
whose bytes are counted, prompt lengths.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from mooncake_jax.model.catalog import resolve
from mooncake_jax.model.loading import load_model
from mooncake_jax.model.sources import Location, open_source
from mooncake_jax.parallel.mesh import MeshShape
from mooncake_jax.parallel.pipeline import load_pipeline
from mooncake_jax.parallel.prefill import PrefillEngine
from mooncake_jax.parallel.processes import join_processes
from mooncake_jax.parallel.sequence import SequencePrefill, load_replicated, sequence_mesh


def main(
    model: str,
    model_dir: str,
    way: str,
    process: str,
    processes: str,
    coordinator: str,
    chunk: str,
    repeats: str,
    device: str,
    *lengths,
):
    count, location = int(processes), resolve(model, Path(model_dir))
    if count > 1:
        join_processes(coordinator, count, int(process))
    vocabulary, engine = open_source(location).config().vocab_size, _engine(location, way, count, int(chunk))
    rng, count_sent = np.random.default_rng(0), Path(f"/sys/class/net/{device}/statistics/tx_bytes")
    figures = {}
    for length in map(int, lengths):
        ids = rng.integers(0, vocabulary, length)
        engine.prefill(ids)
        taken = [_timed(engine.prefill, ids, count_sent) for _ in range(int(repeats))]
        seconds, sent = zip(*taken, strict=True)
        figures[length] = {"seconds": statistics.median(seconds), "bytes": min(sent)}
        if count == 1:
            figures[length]["chunks"] = _chunk_seconds(engine, ids)
    print(json.dumps(figures), flush=True)
    _meet()


def _engine(location: Location, way: str, processes: int, chunk: int) -> PrefillEngine | SequencePrefill:
    if processes == 1:
        return PrefillEngine(load_model(location, "float32"), chunk)
    if way == "sp":
        mesh = sequence_mesh(jax.devices())
        return SequencePrefill(load_replicated(location, "float32", mesh), mesh)
    shape = MeshShape(processes, 1) if way == "cpp" else MeshShape(1, processes)
    return PrefillEngine(load_pipeline(location, "float32", shape), chunk)


def _timed(prefill, ids: np.ndarray, count_sent: Path) -> tuple[float, int]:
    """Seconds until the first token is known to all, and bytes that the network device has sent in the meantime."""
    _meet()
    before, begun = int(count_sent.read_text()), time.monotonic()
    prefill(ids)
    _meet()
    return time.monotonic() - begun, int(count_sent.read_text()) - before


def _meet() -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("benchmark")


def _chunk_seconds(engine: PrefillEngine, ids: np.ndarray) -> list[float]:
    """What each chunk takes on one stage, waiting for each before the next begins; the shorter of two turns."""
    turns = []
    for _ in range(2):
        newest, marks = {}, []
        job = engine.job(ids, on_layer=lambda layer, start, kv, newest=newest: newest.update(kv=kv))

        def entering(job=job, newest=newest, marks=marks):
            for chunk in engine.chunks(job):
                if newest:
                    np.asarray(newest["kv"])
                marks.append(time.monotonic())
                yield chunk

        for _, result in engine.run(entering()):
            result()
        marks.append(time.monotonic())
        turns.append(np.diff(marks))
    return np.minimum(*turns).tolist()


main(*sys.argv[1:])
