"""Chunked pipeline, tensor and sequence parallelism against one device: several devices of a process, one process a
stage, and bad shapes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DATA

from mooncake_jax.cluster.launch import mpiexec_command
from mooncake_jax.errors import UsageError
from mooncake_jax.parallel.mesh import MeshShape
from mooncake_jax.parallel.pipeline import load_pipeline

HERE = Path(__file__).parent
# The deadline of collectives within a process: all devices share the cores of a machine that may be busy.
EIGHT = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_cpu_collective_call_terminate_timeout_seconds=240"
}


def output(*command, **environment):
    """The last line that a script of tests/ prints, from JSON."""
    env = os.environ | {"JAX_PLATFORMS": "cpu"} | environment
    done = subprocess.run(command, cwd=HERE, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("model", "chunk", "shapes"),
    [
        ("tiny-llama2", 64, ("1x1", "2x1", "1x2")),
        ("tiny-llama2", 7, ("2x1", "4x2")),
        ("tiny-llama2", 512, ("2x2", "sp2", "sp3")),
        pytest.param("tiny-llama3", 64, ("4x1", "2x4"), marks=pytest.mark.slow),  # six layers on four stages
        pytest.param("tiny-llama3", 512, ("3x2", "sp4"), marks=pytest.mark.slow),
    ],
)
def test_meshes_compute_what_one_device_does(model, chunk, shapes):
    report = output(sys.executable, "pipeline_equal.py", DATA / model, str(chunk), *shapes, **EIGHT)
    assert set(report) == set(shapes)
    for found in report.values():
        assert found["tokens"] and found["kv"] < 1e-4 and found["logits"] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [7, 64, 512])
@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        ("tiny-llama2", ("1x1", "2x1", "4x1", "1x2", "2x2", "4x2", "sp2")),
        ("tiny-llama3", ("1x1", "2x1", "4x1", "1x2", "2x2", "4x2", "sp4")),
    ],
)
def test_every_mesh_and_chunk_computes_what_one_device_does(model, chunk, shapes):
    test_meshes_compute_what_one_device_does(model, chunk, shapes)


@pytest.mark.parametrize(
    ("model", "chunk", "stages", "tp"),
    [
        ("tiny-llama2", 64, 2, 1),
        pytest.param("tiny-llama3", 7, 4, 1, marks=pytest.mark.slow),
        pytest.param("tiny-llama3", 512, 2, 2, marks=pytest.mark.slow),
    ],
)
def test_one_process_a_stage_computes_what_one_device_does(model, chunk, stages, tp):
    command = [*mpiexec_command(stages), sys.executable, "ranks/pipeline_stages.py", DATA / model, str(chunk), str(tp)]
    report = output(*command)
    assert report["worst"] < 1e-4
    assert report["compared"] == 9  # prompts: four alone, one with a reused prefix, four back to back


@pytest.mark.slow
@pytest.mark.parametrize("shapes", [("2x3",), ("1x1", "2x1", "4x1", "1x3", "sp2")])
def test_golden_tokens(smollm2_path, shapes):
    report = output(sys.executable, "pipeline_golden.py", smollm2_path, "512", *shapes, **EIGHT)
    assert report == dict.fromkeys(shapes, 7)


@pytest.mark.parametrize(
    ("shape", "complaint"),
    [
        (MeshShape(5, 1), "--pp=5: a stage holds at least one of the model's 4 layers; use 1 to 4"),
        (MeshShape(1, 3), "--tp=3: it must divide the model's 2 KV heads"),
        (MeshShape(4, 2), "--pp=4 --tp=2 needs 8 devices, JAX has"),
    ],
)
def test_what_does_not_fit_is_refused(shape, complaint):
    with pytest.raises(UsageError, match=complaint):
        load_pipeline(DATA / "tiny-llama2", "float32", shape)
