"""This machine's engine, as --real measures it: bare prefills and decoding steps, by the functions that instances
measure themselves with as they start. Brings JAX.
"""

from collections.abc import Iterable, Mapping
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
ROOM = REPEATS + 1  # tokens that measuring a step takes beyond its context


class MachineEngine:
    """contexts: the longest that is measured, by the flag that says so. Raises UsageError for more than the model's."""

    def __init__(self, model: str, model_dir: str, contexts: Mapping[str, int]):
        enable_compile_cache(Path(model_dir) / "compiled")
        self._model = load_model(resolve(model, Path(model_dir)), DTYPE)
        most = self._model.config.max_context
        for flag, context in contexts.items():
            if context + ROOM > most:
                raise UsageError(
                    f"--{flag}={context}: {model} has a context of {most}; measuring takes {context + ROOM}"
                )

    def prefills(self, shapes: Iterable[tuple[int, int]]) -> list[float]:
        """Seconds of prefills of so many tokens, of which so many are reused."""
        shapes = list(shapes)
        engine = PrefillEngine(self._model, CHUNK)
        engine.warm_up(max(tokens for tokens, _ in shapes))
        return [prefill_s(engine, self._model.config, *shape, REPEATS) for shape in shapes]

    def steps(self, shapes: Iterable[tuple[int, int]]) -> list[float]:
        """Seconds of steps of so many requests with so many tokens of context each."""
        shapes, config = list(shapes), self._model.config
        pages = max(batch * -(-(context + ROOM) // PAGE) for batch, context in shapes)
        engine = DecodingEngine(self._model, max(batch for batch, _ in shapes), PAGE, pages)
        engine.warm_up()
        layout = BlockLayout(config.num_layers, PAGE, config.num_kv_heads, config.head_dim, DTYPE)
        return [step_s(engine, layout, *shape, REPEATS) for shape in shapes]
