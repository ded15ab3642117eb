"""What arxiv_fig02.py --real measures: prefills by length and decoding steps by batch on this machine's engine, by the
functions of `mooncake-jax profile`.
"""

from collections.abc import Sequence
from pathlib import Path

from mooncake_jax.cache.layout import BlockLayout
from mooncake_jax.cluster.measure import prefill_s, step_s
from mooncake_jax.errors import UsageError
from mooncake_jax.model.catalog import resolve
from mooncake_jax.model.loading import load_model
from mooncake_jax.parallel.compiling import enable_compile_cache
from mooncake_jax.parallel.decoding import DecodingEngine
from mooncake_jax.parallel.prefill import PrefillEngine

DTYPE = "float32"
CHUNK, PAGE = 512, 16  # tokens
REPEATS = 3

Points = list[tuple[int, float]]


def measure(
    model: str, model_dir: str, lengths: Sequence[int], batches: Sequence[int], context: int
) -> tuple[Points, Points]:
    """(tokens, seconds) of prefills, and (requests, seconds) of steps of requests with so many tokens of context each.
    Raises UsageError for more than the model's context.
    """
    enable_compile_cache(Path(model_dir) / "compiled")
    loaded = load_model(resolve(model, Path(model_dir)), DTYPE)
    config, room = loaded.config, context + REPEATS + 1
    for flag, needed in (("longest", max(lengths) + 1), ("context", room)):
        if needed > config.max_context:
            raise UsageError(f"--{flag}: {model} has a context of {config.max_context}; measuring takes {needed}")
    prefill = PrefillEngine(loaded, CHUNK)
    prefill.warm_up(max(lengths))
    prefills = [(n, prefill_s(prefill, config, n, 0, REPEATS)) for n in lengths]
    decoding = DecodingEngine(loaded, max(batches), PAGE, max(batches) * -(-room // PAGE))
    decoding.warm_up()
    layout = BlockLayout(config.num_layers, PAGE, config.num_kv_heads, config.head_dim, DTYPE)
    return prefills, [(batch, step_s(decoding, layout, batch, context, REPEATS)) for batch in batches]
