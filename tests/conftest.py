"""Models for the tests: two tiny ones from tests/data, and SmolLM2-135M where it has been fetched."""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mooncake_jax.model.attention import plain_attention
from mooncake_jax.model.catalog import CATALOG, DEFAULT_MODEL_DIR
from mooncake_jax.model.layers import rotary_table
from mooncake_jax.model.loading import LoadedModel, load_model

DATA = Path(__file__).parent / "data"


class KVRecord:
    """The hooks of one prefill: gives the prefix [L, 2, P, K, D] that is reused, keeps what is computed."""

    def __init__(self, model: LoadedModel, prefix: np.ndarray | None = None):
        self._pieces = [[] for _ in model.layers] if prefix is None else [[layer] for layer in prefix]

    def load_layer(self, layer):
        return self._pieces[layer][0]

    def on_layer(self, layer, start, kv):
        assert start == sum(piece.shape[1] for piece in self._pieces[layer])
        self._pieces[layer].append(kv)

    def whole(self):
        """[L, 2, S, K, D]"""
        return np.stack([np.concatenate([np.asarray(piece) for piece in pieces], axis=1) for pieces in self._pieces])


def prefill(engine, model, ids, prefix=None, **sampling):
    """The first token and the prompt's whole KV [L, 2, S, K, D]; prefix [L, 2, P, K, D] is reused."""
    record = KVRecord(model, prefix)
    reuse = {} if prefix is None else {"prefix_len": prefix.shape[2], "load_layer": record.load_layer}
    return engine.prefill(ids, on_layer=record.on_layer, **reuse, **sampling), record.whole()


class PlainModel:
    """The model as one forward pass over all tokens, without cache or chunks: what every engine is compared with."""

    _PADDED = 128  # tokens, so that one shape is compiled; causal attention does not see the padding

    def __init__(self, model: LoadedModel):
        self._model = model
        self._forward = jax.jit(self._run)

    def _run(self, embedder, layers, ids):
        ends, kept = nnx.merge(self._model.embedder_def, embedder), []

        def attend(q, kv):
            kept.append(kv)
            return plain_attention(q, kv, 0)

        x, rotary = ends.encode(ids), rotary_table(self._model.config, jnp.arange(len(ids)))
        for params in layers:
            x = nnx.merge(self._model.layer_def, params)(x, rotary, attend)
        return ends.decode(x), jnp.stack(kept)

    def forward(self, ids):
        """Logits [T, V] and KV [L, 2, T, K, D]."""
        padded = np.zeros(self._PADDED, np.int32)
        padded[: len(ids)] = ids
        logits, kv = self._forward(self._model.embedder, self._model.layers, padded)
        return np.asarray(logits)[: len(ids)], np.asarray(kv)[:, :, : len(ids)]

    def greedy(self, prompt, tokens):
        ids = list(prompt)
        for _ in range(tokens):
            ids.append(int(self.forward(ids)[0][-1].argmax()))
        return ids[len(prompt) :]


@pytest.fixture(scope="session")
def tiny2():
    return load_model(DATA / "tiny-llama2", "float32")


@pytest.fixture(scope="session")
def tiny3():
    return load_model(DATA / "tiny-llama3", "float32")


@pytest.fixture(scope="session", params=["tiny2", "tiny3"])
def tiny(request):
    """(model, its plain twin, the golden outputs of transformers)"""
    model = request.getfixturevalue(request.param)
    expected = dict(np.load(DATA / f"tiny-llama{request.param[-1]}" / "expected.npz"))
    return model, PlainModel(model), expected


@pytest.fixture(scope="session")
def smollm2_path():
    """The fetched GGUF, or the reason for skipping."""
    folders = [Path(os.environ.get("MOONCAKE_MODEL_DIR") or DEFAULT_MODEL_DIR), DEFAULT_MODEL_DIR]
    for folder in folders:
        path = folder / CATALOG["smollm2-135m"].file_name
        if path.is_file():
            return path
    pytest.skip(f"SmolLM2 is not in {folders[0]}: run `mooncake-jax fetch-model smollm2-135m`")


@pytest.fixture(scope="session")
def smollm2(smollm2_path):
    return load_model(smollm2_path, "float32")


@pytest.fixture(scope="session")
def smollm2_cases():
    return json.loads((DATA / "smollm2_golden.json").read_text())["cases"]


@pytest.fixture(scope="session")
def traces():
    """The folder of the published traces, which are not part of the project; or the reason for skipping."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "traces"
    folder = Path(os.environ.get("MOONCAKE_TRACES") or beside)
    if (folder / "conversation_trace.jsonl").is_file() and (folder / "synthetic_trace.jsonl").is_file():
        return folder
    absent = f"no conversation_trace.jsonl and synthetic_trace.jsonl in {folder}: set MOONCAKE_TRACES to their folder"
    if os.environ.get("MOONCAKE_TRACES_REQUIRED") == "1":
        pytest.fail(absent)
    pytest.skip(absent)
