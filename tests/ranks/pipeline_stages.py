"""One stage a process: run under mpiexec by test_parallel_pipeline.py.

Arguments: a model's path, chunk size, devices of a stage. Rank 0 compares with one device and prints the largest
differences as JSON.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).parent.parent))
from conftest import KVRecord

from mooncake_jax.model.loading import load_model
from mooncake_jax.parallel.mesh import MeshShape
from mooncake_jax.parallel.pipeline import load_pipeline
from mooncake_jax.parallel.prefill import PrefillEngine
from mooncake_jax.parallel.processes import free_address, join_processes

PREFIX = 45


class HeldLayers(KVRecord):
    """Hooks that are called for this stage's layers only."""

    def __init__(self, layers, prefix=None):
        self._pieces = {i: [] if prefix is None else [prefix[i]] for i in layers}

    def whole(self):
        return {
            i: np.concatenate([np.asarray(piece) for piece in pieces], axis=1) for i, pieces in self._pieces.items()
        }


def through(engine, ids, prefix=None):
    """One prompt: (first token or None, KV of the layers held here)."""
    record = HeldLayers(engine.layers, prefix)
    reuse = {} if prefix is None else {"prefix_len": prefix.shape[2], "load_layer": record.load_layer}
    return engine.prefill(ids, on_layer=record.on_layer, **reuse), record.whole()


def back_to_back(engine, prompts):
    records = [HeldLayers(engine.layers) for _ in prompts]
    jobs = [engine.job(ids, on_layer=record.on_layer) for ids, record in zip(prompts, records, strict=True)]
    results = list(engine.run(chunk for job in jobs for chunk in engine.chunks(job)))
    assert [job for job, _ in results] == jobs
    return [(result and result(), record.whole()) for (_, result), record in zip(results, records, strict=True)]


def main(path, chunk, tp):
    comm = MPI.COMM_WORLD
    jax.config.update("jax_num_cpu_devices", int(tp))
    join_processes(comm.bcast(free_address("localhost")), comm.size, comm.rank)
    pipeline = load_pipeline(Path(path), "float32", MeshShape(comm.size, int(tp)))
    assert list(pipeline.held) == [comm.rank] and len(jax.devices()) == comm.size * int(tp)
    model = load_model(Path(path), "float32")
    single, staged = PrefillEngine(model, int(chunk)), PrefillEngine(pipeline, int(chunk))
    staged.warm_up(300)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, model.config.vocab_size, n) for n in (1, 40, 150, int(chunk) + 30)]
    expected = []
    for ids in prompts:
        record = KVRecord(model)
        expected.append((single.prefill(ids, on_layer=record.on_layer), record.whole()))
    found = [through(staged, ids) for ids in prompts]
    found.append(through(staged, prompts[2], expected[2][1][:, :, :PREFIX]))
    found += back_to_back(staged, prompts)
    worst, compared = 0.0, 0
    for (first, kv), (want, whole) in zip(found, [*expected, expected[2], *expected], strict=True):
        assert (first is None) == (comm.rank < comm.size - 1)
        assert first is None or first.token == want.token
        worst = max([worst, *(float(np.abs(layer - whole[i]).max()) for i, layer in kv.items())])
        compared += len(kv)
        if first is not None:
            worst = max([worst, *np.abs(np.subtract(first.top_logits, want.top_logits)[:, 1])])
    worst, compared = comm.gather(worst), comm.gather(compared)
    if comm.rank == 0:
        # Every layer of every prompt by exactly one stage.
        print(json.dumps({"worst": max(worst), "compared": sum(compared) / model.config.num_layers}), flush=True)
    comm.barrier()
    jax.distributed.shutdown()


main(*sys.argv[1:])
