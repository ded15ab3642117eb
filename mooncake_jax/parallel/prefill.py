"""The prefill engine: one request's prompt, chunk by chunk and layer by layer (paper sections 3 and 5).

One compiled function runs any layer, so a hook can load the next layer's reused prefix and send the last one's new KV
while the device computes. Chunks are padded to a few lengths and the KV buffer to powers of two, which bounds what is
compiled; attention's work follows the true length. Knows nothing of blocks, pools or ranks: hooks do.

Legend: T query tokens, S context tokens, K KV heads, D head dim, E width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mooncake_jax.model.attention import TILE
from mooncake_jax.model.layers import rotary_table
from mooncake_jax.model.llama import Embedder
from mooncake_jax.model.loading import LoadedModel, Params
from mooncake_jax.model.sampling import SamplingRows, logprobs, sample
from mooncake_jax.parallel.attention import attend_chunk
from mooncake_jax.parallel.schedule import plan_chunks
from mooncake_jax.request import Sampling, TokenLogprobs

_SHORTEST_CHUNK = 16  # also keeps bfloat16 products from having one row, which is ten times slower than two on CPUs
_SHORTEST_BUFFER = 512
_TOP = 10


class LayerKV:
    """New keys and values of one layer and chunk, [2, T, K, D], perhaps still being computed.

    Making one costs nothing and waits for nothing. `np.asarray(kv)` waits until they are computed and returns them,
    on CPU as a read-only view without a copy: call it where waiting is welcome, in the thread that sends.
    """

    def __init__(self, padded: jax.Array, tokens: int):
        self._padded = padded  # trimmed on the host: a slice on the device would be compiled anew for every length
        self._tokens = tokens

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self._padded.shape[0], self._tokens, *self._padded.shape[2:]

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(np.asarray(self._padded)[:, : self._tokens], dtype=dtype, copy=copy)


LoadLayer = Callable[[int], np.ndarray]  # layer -> [2, prefix_len, K, D] in the model's dtype
OnLayer = Callable[[int, int, LayerKV], None]  # layer, position of the first token, its KV and its followers'


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first output token, the ten most likely ones as (id, logit), highest first, and log-probabilities."""

    token: int
    top_logits: tuple[tuple[int, float], ...]
    logprobs: TokenLogprobs


class PrefillEngine:
    """Computes prompts of one model, one at a time. Holds no state between requests but compiled code."""

    def __init__(self, model: LoadedModel, prefill_chunk: int):
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk is {prefill_chunk}; it must be at least 1 token")
        self._model = model
        self._chunk = prefill_chunk
        self._buckets = chunk_buckets(prefill_chunk)
        self._shapes: set[tuple[int, int]] = set()
        self._begin = jax.jit(partial(_begin, model))
        self._layer = jax.jit(partial(_layer, model.layer_def), donate_argnums=(1, 2))
        self._finish = jax.jit(partial(_finish, model.embedder_def))

    @property
    def dtype(self) -> np.dtype:
        return self._model.dtype

    @property
    def compile_count(self) -> int:
        """Shapes (chunk, buffer) compiled so far: at most len(chunk_buckets(prefill_chunk)) for each power of two."""
        return len(self._shapes)

    def warm_up(self, longest_prompt: int = _SHORTEST_BUFFER) -> None:
        """Compiles whatever prompts of up to longest_prompt tokens need, whatever prefix is reused."""
        power = _SHORTEST_BUFFER
        while True:
            for tokens in self._buckets[: self._buckets.index(self._bucket(min(power, self._chunk))) + 1]:
                kv = self._first_buffer(self._buffer_size(power), 0, 0, None)
                x, rotary = self._start(np.zeros(tokens, np.int32), 0, tokens)
                x, _, _ = self._run_layer(0, x, kv, rotary, 0)
                jax.block_until_ready(self._last_row(x, 0, SamplingRows.greedy(1)))
            if power >= longest_prompt:
                return
            power *= 2

    def prefill(
        self,
        prompt_ids: Sequence[int],
        *,
        prefix_len: int = 0,
        load_layer: LoadLayer | None = None,
        on_layer: OnLayer | None = None,
        sampling: Sampling = Sampling(),
    ) -> FirstToken:
        """Computes tokens prefix_len .. n - 1 of the prompt and samples the first output token.

        load_layer(i) is called once, before layer i of the first chunk, if prefix_len > 0. on_layer(i, start, kv) is
        called as soon as layer i of a chunk has been dispatched: the new KV may still be under way, and it is the
        hook, or the thread it hands kv to, who waits (see LayerKV). Hooks run in this thread and should return soon;
        what they raise passes through and leaves the engine usable.

        Raises ValueError for an empty or too long prompt, an id out of vocabulary, or a prefix that is not within 0
        .. n - 1.
        """
        ids = np.asarray(prompt_ids, np.int64)
        self._check(ids, prefix_len, load_layer)
        rows = SamplingRows.greedy(1)
        rows.fill(0, sampling, 0)
        chunks = plan_chunks(len(ids), prefix_len, self._chunk)
        size = self._buffer_size(len(ids))
        buffers: list[jax.Array | None] = [None] * len(self._model.layers)
        for start, tokens in chunks:
            x, rotary = self._start(ids[start : start + tokens], start, self._bucket(tokens))
            for i in range(len(buffers)):
                kv = self._first_buffer(size, i, prefix_len, load_layer) if start == prefix_len else buffers[i]
                x, buffers[i], new = self._run_layer(i, x, kv, rotary, start)
                if on_layer is not None:
                    on_layer(i, start, LayerKV(new, tokens))
        token, values, (logprob, top_logprobs, top) = jax.device_get(self._last_row(x, tokens - 1, rows))
        likeliest = tuple(zip(top[0].tolist(), top_logprobs[0].tolist(), strict=True))
        top_logits = tuple(zip(top[0].tolist(), values.tolist(), strict=False))
        return FirstToken(int(token), top_logits, TokenLogprobs(float(logprob[0]), likeliest))

    def _check(self, ids: np.ndarray, prefix_len: int, load_layer: LoadLayer | None) -> None:
        config = self._model.config
        if not 1 <= len(ids) <= config.max_context:
            raise ValueError(f"the prompt has {len(ids)} tokens; this model takes 1 to {config.max_context}")
        if ids.min() < 0 or ids.max() >= config.vocab_size:
            raise ValueError(
                f"token ids lie within {ids.min()} and {ids.max()}; this model knows 0 to {config.vocab_size - 1}"
            )
        if not 0 <= prefix_len < len(ids):
            raise ValueError(f"prefix_len is {prefix_len}; of {len(ids)} tokens 0 to {len(ids) - 1} can be reused")
        if prefix_len and load_layer is None:
            raise ValueError(f"prefix_len is {prefix_len}, but no load_layer was given to load the prefix")

    def _bucket(self, tokens: int) -> int:
        return next(bucket for bucket in self._buckets if bucket >= tokens)

    def _buffer_size(self, tokens: int) -> int:
        """A power of two, and room for the padding of a chunk that starts anywhere; in whole tiles of attention."""
        power = max(_SHORTEST_BUFFER, 1 << (tokens - 1).bit_length())
        return power + -(-self._buckets[-1] // TILE) * TILE

    def _buffer_shape(self, size: int) -> tuple[int, int, int, int]:
        return 2, size, self._model.config.num_kv_heads, self._model.config.head_dim

    def _first_buffer(self, size: int, layer: int, prefix_len: int, load_layer: LoadLayer | None) -> jax.Array:
        """A layer's buffer with the reused prefix in it; zeros behind, since masked attention needs finite values."""
        shape = self._buffer_shape(size)
        if not prefix_len:
            return jnp.zeros(shape, self._model.dtype)
        prefix = load_layer(layer)
        wanted = (2, prefix_len, *shape[2:])
        if prefix.shape != wanted or prefix.dtype != self._model.dtype:
            raise ValueError(
                f"load_layer({layer}) gave {prefix.dtype} {list(prefix.shape)}; "
                f"needed is {self._model.dtype} {list(wanted)}"
            )
        filled = np.zeros(shape, self._model.dtype)
        filled[:, :prefix_len] = prefix
        return jax.device_put(filled)  # JAX may keep this very memory: nobody else writes to it

    def _start(self, ids: np.ndarray, start: int, bucket: int) -> tuple[jax.Array, jax.Array]:
        padded = np.zeros(bucket, np.int32)
        padded[: len(ids)] = ids
        return self._begin(self._model.embedder, padded, np.int32(start))

    def _run_layer(
        self, layer: int, x: jax.Array, kv: jax.Array, rotary: jax.Array, start: int
    ) -> tuple[jax.Array, ...]:
        self._shapes.add((x.shape[0], kv.shape[1]))
        return self._layer(self._model.layers[layer], x, kv, rotary, np.int32(start))

    def _last_row(self, x: jax.Array, row: int, sampling: SamplingRows) -> tuple:
        return self._finish(self._model.embedder, x, np.int32(row), sampling)


def chunk_buckets(prefill_chunk: int) -> tuple[int, ...]:
    """Lengths that chunks are padded to: powers of two, and the longest chunk itself (at least 16)."""
    longest = max(prefill_chunk, _SHORTEST_CHUNK)
    powers = [_SHORTEST_CHUNK << i for i in range(longest.bit_length())]
    return (*(power for power in powers if power < longest), longest)


def _begin(model: LoadedModel, embedder: Params, ids: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Token ids [T] at position start -> hidden states [T, E] and their rotary table."""
    x = nnx.merge(model.embedder_def, embedder).encode(ids)
    return x, rotary_table(model.config, start + jnp.arange(ids.shape[0]))


def _layer(
    layer_def: nnx.GraphDef, params: Params, x: jax.Array, kv: jax.Array, rotary: jax.Array, start: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One layer over a chunk: x [T, E], kv [2, S, K, D] -> x, kv with the chunk in it, the chunk's own [2, T, K, D]."""
    stored = {}

    def attend(q: jax.Array, new: jax.Array) -> jax.Array:
        stored["new"] = new
        stored["kv"] = jax.lax.dynamic_update_slice_in_dim(kv, new, start, axis=1)
        return attend_chunk(q, stored["kv"], start)

    x = nnx.merge(layer_def, params)(x, rotary, attend)
    return x, stored["kv"], stored["new"]


def _finish(embedder_def: nnx.GraphDef, params: Params, x: jax.Array, row: jax.Array, sampling: SamplingRows) -> tuple:
    """The first token, the highest logits, and log-probabilities, from one row of hidden states x [T, E]."""
    embedder: Embedder = nnx.merge(embedder_def, params)
    first = jnp.maximum(row - 1, 0)  # two rows, never one: see _SHORTEST_CHUNK
    logits = embedder.decode(jax.lax.dynamic_slice_in_dim(x, first, 2))[row - first][None]
    token = sample(logits, sampling)
    highest, _ = jax.lax.top_k(logits[0], min(_TOP, logits.shape[1]))
    return token[0], highest, logprobs(logits, token, jnp.asarray(True))
