"""One stage of prefill: contiguous layers on the devices of one host (paper sections 5.1 and 5.2).

One compiled function runs any layer, so a hook can load the next layer's reused prefix and send the last one's new KV
while the device computes. Within a stage the compiler cuts heads, MLP and vocabulary over the mesh's tp axis, as the
parameters lie. Knows nothing of other stages, schedules, blocks and ranks.

Legend: T query tokens, S context tokens, K KV heads, D head dim, E width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.model.layers import rotary_table
from mooncake_jax.model.llama import Embedder
from mooncake_jax.model.loading import LoadedModel, Params
from mooncake_jax.model.sampling import SamplingRows, logprobs, sample
from mooncake_jax.parallel.attention import attend_chunk
from mooncake_jax.parallel.sharding import PREFILL_KV

_TOP = 10


class LayerKV:
    """New keys and values of one layer and chunk, [2, T, K, D], perhaps still being computed.

    Making one costs nothing and waits for nothing. `np.asarray(kv)` waits until they are computed and, where the device
    has memory of its own, copied, and returns them, on CPU as a read-only view without a copy: call it where waiting is
    welcome, in the thread that sends.
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


@dataclass(slots=True, eq=False)
class PrefillJob:
    """A prompt on its way through the stages; buffer: tokens that each layer's KV [2, buffer, K, D] has room for."""

    ids: np.ndarray
    prefix_len: int
    load_layer: LoadLayer | None
    on_layer: OnLayer | None
    sampling: SamplingRows
    buffer: int
    kv: dict[int, jax.Array] = field(default_factory=dict)  # of layers that are not through with it


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Tokens start .. start + tokens - 1 of a prompt, computed as a bucket of at least so many."""

    job: PrefillJob
    start: int
    tokens: int
    bucket: int

    @property
    def first(self) -> bool:
        return self.start == self.job.prefix_len

    @property
    def last(self) -> bool:
        return self.start + self.tokens == len(self.job.ids)


class StagePrograms(NamedTuple):
    """What a stage runs, jitted; "embedder" and "layer" stand for their parameters."""

    embed: Callable  # embedder, ids [T] -> x [T, E]
    rotary: Callable  # the first token's position, T -> rotary_table's [2, T, 1, D / 2]
    layer: Callable  # layer, x, KV [2, S, K, D], rotary, the first token's position -> x, KV, new KV [2, T, K, D]
    finish: Callable  # embedder, x, row, SamplingRows -> what finish gives


def stage_programs(model: LoadedModel, mesh: Mesh | None) -> StagePrograms:
    """mesh: the stage's devices over TP, JAX's default if None. Hidden states lie whole on each of them."""
    whole, kv = (None, None) if mesh is None else (NamedSharding(mesh, P()), NamedSharding(mesh, PREFILL_KV))
    outputs = None if mesh is None else (whole, kv, kv)
    return StagePrograms(
        embed=jax.jit(partial(_embed, model.embedder_def), out_shardings=whole),
        rotary=jax.jit(partial(_rotary, model.config), static_argnums=1, out_shardings=whole),
        layer=jax.jit(partial(_layer, model.layer_def), donate_argnums=(1, 2), out_shardings=outputs),
        finish=jax.jit(partial(finish, model.embedder_def), out_shardings=whole),
    )


class Stage:
    """The layers of one stage and, if it is the first or the last, that end of the model."""

    def __init__(self, model: LoadedModel, layers: range, mesh: Mesh | None):
        """model has the parameters of just these layers; mesh: the stage's devices over TP, JAX's default if None."""
        self.layers, self._model = layers, model
        self._programs = stage_programs(model, mesh)
        self._kv = None if mesh is None else NamedSharding(mesh, PREFILL_KV)
        self._copies = jax.default_backend() != "cpu"  # CPUs have their KV where the host reads it

    def embed(self, chunk: Chunk) -> jax.Array:
        """The chunk's token ids as hidden states [bucket, E]; the first stage's work."""
        padded = np.zeros(chunk.bucket, np.int32)
        padded[: chunk.tokens] = chunk.job.ids[chunk.start : chunk.start + chunk.tokens]
        return self._programs.embed(self._model.embedder, padded)

    def compute(self, chunk: Chunk, x: jax.Array) -> jax.Array:
        """Dispatches all layers over a chunk's hidden states [bucket, E], which it consumes, with the job's hooks."""
        rotary = self._programs.rotary(np.int32(chunk.start), chunk.bucket)
        for place in range(len(self.layers)):
            x = self._compute_layer(place, chunk, x, rotary)
        return x

    def compute_one(self, chunk: Chunk, x: jax.Array) -> jax.Array:
        """The first layer alone, which compiles what all need."""
        return self._compute_layer(0, chunk, x, self._programs.rotary(np.int32(chunk.start), chunk.bucket))

    def finish(self, x: jax.Array, row: int, sampling: SamplingRows) -> tuple:
        """Token, highest logits, and log-probabilities from one row of hidden states [T, E]; the last stage's work."""
        return self._programs.finish(self._model.embedder, x, np.int32(row), sampling)

    def _compute_layer(self, place: int, chunk: Chunk, x: jax.Array, rotary: jax.Array) -> jax.Array:
        job, number = chunk.job, self.layers[place]
        kv = self._first_buffer(job, number) if chunk.first else job.kv.pop(number)
        x, kv, new = self._programs.layer(self._model.layers[place], x, kv, rotary, np.int32(chunk.start))
        if not chunk.last:
            job.kv[number] = kv
        if job.on_layer is not None:
            if self._copies:
                new.copy_to_host_async()
            job.on_layer(number, chunk.start, LayerKV(new, chunk.tokens))
        return x

    def _first_buffer(self, job: PrefillJob, layer: int) -> jax.Array:
        """A layer's buffer with the reused prefix in it; zeros behind, since masked attention needs finite values."""
        config, dtype = self._model.config, self._model.dtype
        shape = (2, job.buffer, config.num_kv_heads, config.head_dim)
        if not job.prefix_len:
            return jnp.zeros(shape, dtype, device=self._kv)
        prefix = job.load_layer(layer)
        wanted = (2, job.prefix_len, *shape[2:])
        if prefix.shape != wanted or prefix.dtype != dtype:
            raise ValueError(
                f"load_layer({layer}) gave {prefix.dtype} {list(prefix.shape)}; needed is {dtype} {list(wanted)}"
            )
        filled = np.zeros(shape, dtype)
        filled[:, : job.prefix_len] = prefix
        return jax.device_put(filled, self._kv)  # JAX may keep this very memory: nobody else writes to it


def _embed(embedder_def: nnx.GraphDef, params: Params, ids: jax.Array) -> jax.Array:
    return nnx.merge(embedder_def, params).encode(ids)


def _rotary(config: LlamaConfig, start: jax.Array, tokens: int) -> jax.Array:
    return rotary_table(config, start + jnp.arange(tokens))


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


def finish(embedder_def: nnx.GraphDef, params: Params, x: jax.Array, row: jax.Array, sampling: SamplingRows) -> tuple:
    """The first token, the highest logits, and log-probabilities, from one row of hidden states x [T, E]."""
    embedder: Embedder = nnx.merge(embedder_def, params)
    first = jnp.maximum(row - 1, 0)  # two rows, never one: a bfloat16 product with one is ten times slower on CPUs
    logits = embedder.decode(jax.lax.dynamic_slice_in_dim(x, first, 2))[row - first][None]
    token = sample(logits, sampling)
    highest, _ = jax.lax.top_k(logits[0], min(_TOP, logits.shape[1]))
    return token[0], highest, logprobs(logits, token, jnp.asarray(True))
