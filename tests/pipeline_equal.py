"""Prefill on meshes of several devices against one device: run by test_parallel_pipeline.py, in a process of its own
because JAX fixes its number of devices at start.

Arguments: a model's path, chunk size, then meshes as PPxTP, or spN for sequence parallelism. Prints for each, as JSON,
the largest differences of KV and first logits, and whether tokens are equal.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from conftest import KVRecord, prefill

from mooncake_jax.model.loading import load_model
from mooncake_jax.parallel.mesh import MeshShape
from mooncake_jax.parallel.pipeline import load_pipeline
from mooncake_jax.parallel.prefill import PrefillEngine
from mooncake_jax.parallel.sequence import SequencePrefill, load_replicated, sequence_mesh

PREFIX = 45


def cases(vocab, chunk):
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab, n) for n in (1, 40, 150, chunk + 30)]


def difference(first, kv, expected):
    logits = dict(expected[0].top_logits)
    return (
        float(np.abs(kv - expected[1]).max()),
        max(abs(logits.get(token, logits[expected[0].token]) - value) for token, value in first.top_logits[:3]),
        first.token == expected[0].token,
    )


def together(engine, model, prompts):
    """All prompts through the pipeline back to back: first tokens and KV."""
    records = [KVRecord(model) for _ in prompts]
    jobs = [engine.job(ids, on_layer=record.on_layer) for ids, record in zip(prompts, records, strict=True)]
    results = list(engine.run(chunk for job in jobs for chunk in engine.chunks(job)))
    assert [job for job, _ in results] == jobs
    return [(result(), record.whole()) for (_, result), record in zip(results, records, strict=True)]


def by_sequence(path, devices, prompts, expected):
    """The differences of sequence parallelism, whole and with a reused prefix."""
    mesh = sequence_mesh(jax.devices()[:devices])
    engine = SequencePrefill(load_replicated(path, "float32", mesh), mesh)
    found = []
    for ids, (first, kv) in zip(prompts, expected, strict=True):
        for reused in (0, PREFIX) if len(ids) > PREFIX else (0,):
            got, whole = engine.prefill(ids, reused, lambda i, kv=kv, n=reused: kv[i][:, :n])
            found.append(difference(got, whole(), (first, kv[:, :, reused:])))
    return found


def by_stages(path, name, chunk, model, prompts, expected):
    """The differences of a pipeline: prompts whole, with a reused prefix, and back to back."""
    engine = PrefillEngine(load_pipeline(path, "float32", MeshShape(*map(int, name.split("x")))), chunk)
    found = [difference(*prefill(engine, model, ids), want) for ids, want in zip(prompts, expected, strict=True)]
    found.append(difference(*prefill(engine, model, prompts[2], prefix=expected[2][1][:, :, :PREFIX]), expected[2]))
    behind = zip(together(engine, model, prompts), expected, strict=True)
    return found + [difference(*got, want) for got, want in behind]


def main(path, chunk, *shapes):
    model = load_model(Path(path), "float32")
    single = PrefillEngine(model, int(chunk))
    prompts = cases(model.config.vocab_size, int(chunk))
    expected = [prefill(single, model, ids) for ids in prompts]
    report = {}
    for name in shapes:
        if name.startswith("sp"):
            found = by_sequence(Path(path), int(name[2:]), prompts, expected)
        else:
            found = by_stages(Path(path), name, int(chunk), model, prompts, expected)
        kv, logits, tokens = zip(*found, strict=True)
        report[name] = {"kv": max(kv), "logits": max(logits), "tokens": all(tokens)}
    print(json.dumps(report))


assert len(jax.devices()) == 8
main(*sys.argv[1:])
