"""Hugging Face folders: slices, dtypes and fingerprints; whatever is broken is named in one line."""

import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import DATA
from safetensors.numpy import load_file, save_file

from mooncake_jax.errors import UsageError
from mooncake_jax.model.loading import load_model
from mooncake_jax.model.sources import model_fingerprint, open_source

TINY = DATA / "tiny-llama2"


@pytest.fixture
def folder(tmp_path):
    """A copy of tiny-llama2 to break."""
    return shutil.copytree(TINY, tmp_path / "model")


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refused(complaint, path, work=lambda path: load_model(path, "float32")):
    with pytest.raises(UsageError, match=complaint) as caught:
        work(path)
    assert "\n" not in str(caught.value)


def test_safetensors_refusals(folder):
    index, shard = folder / "model.safetensors.index.json", folder / "model-00003-of-00005.safetensors"
    edit(folder / "config.json", num_hidden_layers=5)
    refused("tensors missing: model.layers.4.input_layernorm.weight, .* and 6 more", folder)
    edit(folder / "config.json", num_hidden_layers=4, tie_word_embeddings=True)
    load_model(folder, "float32")  # a tied head's copy in the file is no fault
    edit(folder / "config.json", tie_word_embeddings=False, vocab_size=321)
    refused(r"embed_tokens.weight has shape \[320, 64\], the config asks for \[321, 64\]", folder)
    edit(folder / "config.json", vocab_size=320)
    shard.write_bytes(shard.read_bytes()[:-100])
    refused("00003-of-00005.safetensors: not a whole safetensors file", folder)
    shard.unlink()
    refused("00003-of-00005.safetensors: no such weight file", folder)
    index.write_text("{}")
    refused("index.json: no weight_map", folder)
    index.unlink()
    refused("model.safetensors: no such weight file", folder)
    (folder / "config.json").write_text("not json")
    refused("config.json: not JSON", folder)
    (folder / "config.json").unlink()
    refused("config.json: No such file", folder)


@pytest.mark.parametrize("name", [5, None, [], "a" * 300, "../model.safetensors", "/dev/null", "a\nb", ""], ids=str)
def test_an_index_that_names_no_file(folder, name):
    path = folder / "model.safetensors.index.json"
    edit(path, weight_map=json.loads(path.read_text())["weight_map"] | {"model.norm.weight": name})
    refused(r"weight_map has .*, which is no file's name|aaa: no such weight file", folder)


def test_json_too_deep_to_be_read(folder):
    for name in ("config.json", "model.safetensors.index.json"):
        whole = (folder / name).read_text()
        (folder / name).write_text("[" * 200_000)
        refused(f"{name}: nested too deeply", folder)
        (folder / name).write_text(whole)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "bool", "float8_e4m3fn"])
def test_numbers_that_need_a_scale_are_refused(folder, dtype):
    path = folder / "model-00002-of-00005.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[0]
    save_file(tensors | {name: tensors[name].astype(jax.numpy.dtype(dtype))}, path)
    refused(f"{path.name}: {name} is stored as [A-Z0-9_]+, not one of F64, F32, F16, BF16; use", folder)


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_other_floats_are_read(folder, dtype):
    for path in folder.glob("*.safetensors"):
        save_file({name: x.astype(dtype) for name, x in load_file(path).items()}, path)
    source, name = open_source(folder), "model.norm.weight"
    assert source.read(name, (slice(None),)).dtype == dtype
    assert load_model(folder, "float32").layers[0]["mlp"]["up"]["kernel"].dtype == np.float32


def test_an_absurd_depth_ends_in_one_line(folder):
    edit(folder / "config.json", num_hidden_layers=9000)
    refused("asks for 9000 layers, of 39 tensors in all; check that the config belongs to these weights", folder)
    edit(folder / "config.json", num_hidden_layers=3_000_000)
    refused("num_layers is 3000000", folder)


def test_only_a_slice_is_read():
    source = open_source(TINY)
    name = "model.layers.1.mlp.down_proj.weight"
    whole = source.read(name, (slice(None), slice(None)))
    assert whole.shape == source.shapes[name] == (64, 176)
    np.testing.assert_array_equal(source.read(name, (slice(3, 9), slice(100, 176))), whole[3:9, 100:])
    assert source.read("model.norm.weight", (slice(60, 64),)).shape == (4,)


def test_an_unknown_dtype_is_refused(folder):
    refused(
        "dtype 'float16' is not known; use one of float32, bfloat16", folder, lambda path: load_model(path, "float16")
    )


def test_bfloat16_weights_are_read(folder, tiny2):

    for path in folder.glob("*.safetensors"):
        save_file({name: x.astype(jax.numpy.bfloat16) for name, x in load_file(path).items()}, path)
    stored, rounded = load_model(folder, "bfloat16"), load_model(TINY, "bfloat16")
    assert stored.layers[0]["mlp"]["up"]["kernel"].dtype == jax.numpy.bfloat16
    jax.tree.map(np.testing.assert_array_equal, stored.layers, rounded.layers)


def test_fingerprint_tells_weights_config_and_dtype_apart(folder):
    whole = model_fingerprint(TINY, "float32")
    assert whole == model_fingerprint(folder, "float32")
    assert len(whole) == 32
    found = {whole, model_fingerprint(TINY, "bfloat16")}
    edit(folder / "config.json", rope_parameters={"rope_theta": 20000.0, "rope_type": "default"})
    found.add(model_fingerprint(folder, "float32"))
    shutil.copy(TINY / "config.json", folder)
    shard = folder / "model-00002-of-00005.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    found.add(model_fingerprint(folder, "float32"))
    assert len(found) == 4


def test_inspecting_a_model_needs_no_jax():
    code = (
        "import sys, pathlib; from mooncake_jax.model import catalog; from mooncake_jax.model.sources import *; "
        f"path = pathlib.Path({str(TINY)!r}); inspect_model(path); model_fingerprint(path, 'float32'); "
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
