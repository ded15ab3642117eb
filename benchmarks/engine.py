"""How near the engines come to the machine's limits, and to transformers on the same machine.

    python benchmarks/engine.py [--model=smollm2-135m] [--dtype=float32,bfloat16] [--json=FILE]

References are taken in the same run, in turns with what is compared: the rate of a matrix product of the model's size,
the rate at which 200 MB are summed, one scan over all layers, and transformers where it and torch are installed.
Useful FLOPs are the causal ones, without the head. Rows are printed, and written, as they are measured: a run that is
killed keeps them. Whatever the figures are, the exit code is 0. A model whose context is short is measured on less.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from command import parse, run
from engine_peers import TransformersPeer, layer_scan, transformers_peer
from table import Row, at_least, at_most, interleaved, print_heads, print_row, row, write_json

from mooncake_jax.errors import UsageError
from mooncake_jax.model.catalog import DEFAULT_MODEL_DIR, resolve
from mooncake_jax.model.config import DTYPE_BYTES, LlamaConfig
from mooncake_jax.model.loading import LoadedModel, load_model
from mooncake_jax.model.sources import Location, open_source
from mooncake_jax.parallel.decoding import DecodingEngine
from mooncake_jax.parallel.prefill import PrefillEngine

FLAGS = flags.FlagValues()
flags.DEFINE_string("model", "smollm2-135m", "a model's name or path", flag_values=FLAGS)
flags.DEFINE_string("model_dir", str(DEFAULT_MODEL_DIR), "folder that models are kept in", flag_values=FLAGS)
flags.DEFINE_list("dtype", ["float32", "bfloat16"], "float32, bfloat16 or both", flag_values=FLAGS)
flags.DEFINE_string("json", None, "write the rows to this file too", flag_values=FLAGS)

CHUNK, CONTEXT, PAGE = 512, 512, 16
PREFILL = {512: (5, {"float32": 0.70, "bfloat16": 0.55}), 2048: (3, {"float32": 0.60}), 8192: (1, {"float32": 0.50})}
DECODING = {1: {"float32": 1.4, "bfloat16": 2.5}, 4: {}, 16: {"float32": 2.2, "bfloat16": 3.0}}
PEER_PREFILL, PEER_DECODING = {512: 1.1, 2048: 0.95}, {1: 2.0, 16: 1.4}  # float32
STEPS = 11
ADDED = 2 * STEPS + 4  # tokens that decoding may add to a context
SHORTEST_CONTEXT = ADDED + PAGE
PRODUCTS = 40  # matrix products timed together
SUMMED = 200_000_000  # bytes


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    location = _check()
    rows = []
    print(f"{FLAGS.model} on {jax.devices()[0].device_kind}, JAX {jax.__version__}, chunks of {CHUNK} tokens")
    print_heads()
    for found in measured(location):
        print_row(found)
        rows.append(found)
        if FLAGS.json:
            write_json(Path(FLAGS.json), rows)
    return 0


def _check() -> Location:
    """Where the model is, all flags checked before anything is measured. Raises UsageError."""
    if not FLAGS.dtype or not set(FLAGS.dtype) <= set(DTYPE_BYTES):
        raise UsageError(f"--dtype={','.join(FLAGS.dtype)}: use float32, bfloat16 or both with a comma")
    location = resolve(FLAGS.model, Path(FLAGS.model_dir))
    context = open_source(location).config().max_context
    if context < SHORTEST_CONTEXT:
        raise UsageError(
            f"--model={FLAGS.model}: its context is {context} tokens; use a model with at least {SHORTEST_CONTEXT}"
        )
    return location


def measured(location: Location) -> Iterator[Row]:
    for dtype in FLAGS.dtype:
        model = load_model(location, dtype)
        peer = transformers_peer(model)
        yield from prefill_rows(model, dtype, peer)
        yield from hook_rows(model, dtype)
        yield from decoding_rows(model, dtype, peer)


def prefill_rows(model: LoadedModel, dtype: str, peer: TransformersPeer | None) -> Iterator[Row]:
    engine = PrefillEngine(model, CHUNK)
    for tokens, (repeats, targets) in PREFILL.items():
        if tokens > model.config.max_context or not (dtype in targets or tokens in PEER_PREFILL):
            continue
        ids = _ids(model, tokens)
        work = {"ours": lambda ids=ids: engine.prefill(ids), "product": products(dtype)}
        if peer is not None and tokens in PEER_PREFILL:
            work["transformers"] = lambda ids=ids: peer.prefill(ids)
        seconds = interleaved(work, repeats)
        rate = PRODUCTS * 2 * 512 * 576 * 1536 / seconds["product"] / 1e9
        target = at_least(targets[dtype]) if dtype in targets else None
        achieved = useful_flops(model.config, tokens) / seconds["ours"] / 1e9
        yield row(f"{dtype} prefill {tokens}, of the product's rate", achieved, "GFLOP/s", rate, target)
        if "transformers" in work:
            target = at_least(PEER_PREFILL[tokens]) if dtype == "float32" else None
            ours, theirs = tokens / seconds["ours"], tokens / seconds["transformers"]
            yield row(f"{dtype} prefill {tokens}, of transformers'", ours, "tok/s", theirs, target)


def hook_rows(model: LoadedModel, dtype: str) -> Iterator[Row]:
    """Layer by layer with a hook that takes every layer's KV, against all layers in one scan."""
    tokens = min(CHUNK, model.config.max_context)
    engine, ids = PrefillEngine(model, CHUNK), _ids(model, tokens)
    work = {"ours": lambda: engine.prefill(ids, on_layer=lambda *_: None), "scan": layer_scan(model, ids)}
    seconds = interleaved(work, PREFILL[CHUNK][0])
    name = f"{dtype} prefill {tokens} by layers, of one scan's time"
    yield row(name, seconds["ours"] * 1e3, "ms", seconds["scan"] * 1e3, at_most(1.1))


def decoding_rows(model: LoadedModel, dtype: str, peer: TransformersPeer | None) -> Iterator[Row]:
    config, largest = model.config, max(DECODING)
    context = min(CONTEXT, config.max_context - ADDED)
    engine = DecodingEngine(model, largest, PAGE, largest * -(-(context + ADDED) // PAGE))
    shape = (config.num_layers, 2, context, config.num_kv_heads, config.head_dim)
    kv = np.random.default_rng(0).standard_normal(shape, np.float32).astype(model.dtype)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves((model.embedder, model.layers)))
    for batch, targets in DECODING.items():
        for request in range(batch):
            engine.join(request, kv, 0, context + ADDED)
        work = {"ours": engine.step, "sum": summation()}
        if peer is not None and batch in PEER_DECODING:
            work["transformers"] = peer.decoding(batch, context)
        seconds = interleaved(work, STEPS)
        reading = (weights + batch * kv.nbytes) / (SUMMED / seconds["sum"])
        target = at_most(targets[dtype]) if dtype in targets else None
        name = f"{dtype} decoding, batch {batch}"
        yield row(f"{name}, of one reading", seconds["ours"] * 1e3, "ms", reading * 1e3, target)
        if "transformers" in work:
            target = at_least(PEER_DECODING[batch]) if dtype == "float32" else None
            ours, theirs = batch / seconds["ours"], batch / seconds["transformers"]
            yield row(f"{name}, of transformers'", ours, "tok/s", theirs, target)
        yield _host_row(engine, batch, dtype)
        for request in range(batch):
            engine.leave(request)


def _host_row(engine: DecodingEngine, batch: int, dtype: str) -> Row:
    """What a step takes beyond its device computation: from its start until the computation is on its way, and from
    there being a result until the step's end.
    """
    compiled, waited = engine._step, []

    def dispatch_and_wait(*arguments):
        result = compiled(*arguments)
        begun = time.perf_counter()
        jax.block_until_ready(result)
        waited.append(time.perf_counter() - begun)
        return result

    engine._step, host = dispatch_and_wait, []
    for _ in range(STEPS):
        begun = time.perf_counter()
        engine.step()
        host.append(time.perf_counter() - begun - waited[-1])
    engine._step = compiled
    return row(f"{dtype} decoding, batch {batch}, on the host", statistics.median(host) * 1e3, "ms", None, at_most(1.0))


def useful_flops(config: LlamaConfig, tokens: int) -> float:
    """Of all layers, with causal attention."""
    query, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    weights = config.hidden_size * (2 * query + 2 * keys + 3 * config.intermediate_size)
    return config.num_layers * (2.0 * tokens * weights + 2.0 * tokens * (tokens + 1) * query)


def products(dtype: str) -> Callable[[], object]:
    a, b = jnp.ones((512, 576), dtype), jnp.ones((576, 1536), dtype)
    multiply = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32).astype(a.dtype))
    return lambda: jax.block_until_ready([multiply(a, b) for _ in range(PRODUCTS)])


def summation() -> Callable[[], object]:
    memory, add = jnp.ones(SUMMED // 4, jnp.float32), jax.jit(jnp.sum)
    return lambda: jax.block_until_ready(add(memory))


def _ids(model: LoadedModel, tokens: int) -> np.ndarray:
    return np.random.default_rng(tokens).integers(0, model.config.vocab_size, tokens)


if __name__ == "__main__":
    run(main)
