"""Golden prompts prefilled on meshes of several devices and decoded on one: run by test_parallel_pipeline.py, in a
process of its own because JAX fixes its number of devices at start.

Arguments: the model's path, chunk size, then meshes as PPxTP, or spN for sequence parallelism. Prints how many golden
cases each reproduced.
"""

import json
import sys
from pathlib import Path

import jax
from conftest import DATA, prefill

from mooncake_jax.model.loading import load_model
from mooncake_jax.parallel.decoding import DecodingEngine
from mooncake_jax.parallel.mesh import MeshShape
from mooncake_jax.parallel.pipeline import load_pipeline
from mooncake_jax.parallel.prefill import PrefillEngine
from mooncake_jax.parallel.sequence import SequencePrefill, load_replicated, sequence_mesh


def main(path, chunk, *shapes):
    cases = json.loads((DATA / "smollm2_golden.json").read_text())["cases"]
    model = load_model(Path(path), "float32")
    decoding = DecodingEngine(model, max_batch=1, page_size=16, num_pages=160)
    report = {}
    for name in shapes:
        run = by_sequence(path, int(name[2:])) if name.startswith("sp") else by_stages(path, name, int(chunk), model)
        report[name] = sum(golden(run, decoding, case) for case in cases)
    print(json.dumps(report))


def by_stages(path, name, chunk, model):
    engine = PrefillEngine(load_pipeline(Path(path), "float32", MeshShape(*map(int, name.split("x")))), chunk)
    return lambda ids: prefill(engine, model, ids)


def by_sequence(path, devices):
    mesh = sequence_mesh(jax.devices()[:devices])
    engine = SequencePrefill(load_replicated(Path(path), "float32", mesh), mesh)

    def run(ids):
        first, kv = engine.prefill(ids)
        return first, kv()

    return run


def golden(run, decoding, case):
    ids, wanted = case["prompt_ids"], case["greedy"]
    first, kv = run(ids)
    decoding.join(0, kv, first.token, len(ids) + len(wanted))
    tokens = [first.token, *(decoding.step()[0] for _ in wanted[1:])]
    decoding.leave(0)
    logits = dict(case["first_logits_top10"])
    return tokens == wanted and all(abs(logits[token] - value) < 2e-3 for token, value in first.top_logits)


main(*sys.argv[1:])
