"""Loading onto a mesh, from every kind of source, gives the same arrays; a rank holds its share and one tensor more."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import DATA
from safetensors.numpy import save_file
from test_model_gguf import write_tiny

from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.model.conversion import convert_model
from mooncake_jax.model.dummy import DummyModel

HERE = Path(__file__).parent
MIB = 2**20
# 150 MiB in float32, of which the largest tensor has 16.
LARGE = LlamaConfig(8192, 512, 2048, 8, 8, 8, 64, 10000.0, None, 1e-5, True, 256)
LARGEST = 8192 * 512 * 4
# Its embedding has 4 MiB in blocks of 1638 rows: half of the rows is no whole number of them.
MANY_BLOCKS = DummyModel(LlamaConfig(8190, 128, 176, 1, 8, 2, 8, 10000.0, None, 1e-5, True, 256), 3)
SLACK = 16 * MIB  # allocators and threads


def run(*command, **environment):
    """Starts a script of tests/ in a process of its own."""
    env = os.environ | {"JAX_PLATFORMS": "cpu"} | environment
    command = [sys.executable, *map(str, command)]
    return subprocess.Popen(command, cwd=HERE, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def output(process):
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return out


def test_every_source_onto_a_mesh(tmp_path):
    gguf = write_tiny(tmp_path / "tiny.gguf")
    convert_model(DATA / "tiny-llama2", tmp_path / "orbax", "float32", lambda done, total: None)
    convert_model(MANY_BLOCKS, tmp_path / "blocks", "float32", lambda done, total: None)
    sources = ("", DATA / "tiny-llama2", DATA / "tiny-llama3", gguf, tmp_path / "orbax", tmp_path / "blocks")
    compared = int(output(run("mesh_loading.py", *sources, JAX_NUM_CPU_DEVICES="4")))
    assert compared == 2 * ((3 + 9 * 3) + 3 * (3 + 9 * 4) + (2 + 9 * 6) + (2 + 9))


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A folder in HF layout."""
    folder, rng = tmp_path_factory.mktemp("large"), np.random.default_rng(0)
    (folder / "config.json").write_text(json.dumps(LARGE.to_hf()))
    e, i = LARGE.hidden_size, LARGE.intermediate_size
    shapes = {"model.embed_tokens": (8192, e), "model.norm": (e,)}
    for n in range(LARGE.num_layers):
        layer = {f"self_attn.{x}_proj": (e, e) for x in "qkvo"} | {f"mlp.{x}_proj": (i, e) for x in ("gate", "up")}
        layer |= {"mlp.down_proj": (e, i), "input_layernorm": (e,), "post_attention_layernorm": (e,)}
        shapes |= {f"model.layers.{n}.{name}": shape for name, shape in layer.items()}
    tensors = {f"{name}.weight": rng.random(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def large_orbax(large, tmp_path_factory):
    """The same as Orbax checkpoints."""
    folder = tmp_path_factory.mktemp("orbax") / "large"
    convert_model(large, folder, "float32", lambda done, total: None)
    return folder


@pytest.fixture(params=["large", "large_orbax"])
def source(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("dtype, width", [("float32", 4), ("bfloat16", 2)])
def test_loading_holds_the_model_and_one_tensor_more(source, dtype, width):
    measured = json.loads(output(run("loading_memory.py", source, dtype)))
    assert measured["share"] == LARGE.parameters * width
    assert measured["share"] < measured["peak"] + SLACK
    assert measured["peak"] < measured["share"] + LARGEST + SLACK, measured


def test_a_rank_holds_its_share_and_one_tensor_more(source):
    """Two processes, each with half of every matrix."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    ranks = [run("loading_memory.py", source, "float32", address, rank) for rank in (0, 1)]
    for measured in [json.loads(output(rank)) for rank in ranks]:
        assert LARGE.parameters * 2 <= measured["share"] < LARGE.parameters * 2.02
        assert measured["peak"] < measured["share"] + LARGEST + SLACK, measured
