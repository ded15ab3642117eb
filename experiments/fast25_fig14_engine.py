"""What fast25_fig14.py --real measures: prefills and decoding steps of this machine's engine, one request at a time,
by the functions of `mooncake-jax profile`.
"""

from collections.abc import Mapping, Sequence
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


def measure(
    model: str, model_dir: str, lengths: Sequence[int], reused: Mapping[str, float], steps: int
) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """By reuse and part ("Prefill"; with nothing reused also "Decode", of so many steps) the (tokens, seconds). Raises
    UsageError for a prompt beyond the model's context.
    """
    enable_compile_cache(Path(model_dir) / "compiled")
    loaded = load_model(resolve(model, Path(model_dir)), DTYPE)
    config, longest = loaded.config, max(lengths)
    room = longest + REPEATS + 1
    if room > config.max_context:
        raise UsageError(f"--longest={longest}: {model} has a context of {config.max_context}; measuring takes {room}")
    prefill = PrefillEngine(loaded, CHUNK)
    prefill.warm_up(longest)
    found = {
        reuse: {"Prefill": [(n, prefill_s(prefill, config, n, int(part * n), REPEATS)) for n in lengths]}
        for reuse, part in reused.items()
    }
    decoding = DecodingEngine(loaded, 1, PAGE, -(-room // PAGE))
    decoding.warm_up()
    layout = BlockLayout(config.num_layers, PAGE, config.num_kv_heads, config.head_dim, DTYPE)
    nothing = next(iter(reused))
    found[nothing]["Decode"] = [(n, steps * step_s(decoding, layout, 1, n, REPEATS)) for n in lengths]
    return found
