"""What prefill and decoding of a model cost on a mesh, from programs that are compiled but never run.

The steps are lowered for jax.ShapeDtypeStructs, so that a model of any size is planned for without its weights. Costs
are read from the compiled program of one device (hlo.py), whose loops turn as often as the compiler knows, because each
program is made for one chunk at one place. They are compared with the paper's l (a n^2 d + b n d^2) (section 5.1).
Attention computes a chunk whole, as the formula has it, where the engine skips tiles that are masked. Knows nothing of
engines, requests or time.

Legend: T query tokens, S context tokens, B batch, N pages, K KV heads, D head dim, E width, V vocabulary.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mooncake_jax.model.attention import TILE, paged_attention, pages_per_tile, prefill_attention
from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.model.layers import rotary_table
from mooncake_jax.model.llama import Params
from mooncake_jax.parallel.hlo import COLLECTIVES, FLOPS, program_costs
from mooncake_jax.parallel.mesh import PP
from mooncake_jax.parallel.sharding import ACTIVATIONS, PAGES, PREFILL_KV, StagedModel, device_bytes, sharded

PAPER_B = 22  # what the paper takes for LLaMA2-70B
PAGE = 16  # tokens
MOST_TOKENS = 2**31 - TILE  # of a request: positions are int32, and so is their sum with a tile's width
MOST_PAGES = 2**31 - 1  # of a decoding step: their ids are int32

# Parameters of a layer, x [T, E] and the layer's KV on one stage -> x and KV.
Layer = Callable[[Params, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The cost of prefilling one prompt, or of one decoding step of a batch.

    kv_bytes, temporary_bytes, flops, head_flops and sent_bytes (by kind of collective, both ends of the model included)
    are one device's, of a stage with the most layers. flops are the layers' alone; total_flops are all devices',
    formula_flops and paper_flops what l (a n^2 d + b n d^2) gives for them with b from the configuration and with the
    paper's.
    """

    kv_bytes: int
    temporary_bytes: int
    flops: int
    head_flops: int
    sent_bytes: dict[str, int]
    total_flops: float
    formula_flops: float
    paper_flops: float
    lower_s: float
    compile_s: float


@dataclass(frozen=True, slots=True)
class _Program:
    costs: Counter
    temporary_bytes: int
    lower_s: float
    compile_s: float


def plan_prefill(model: StagedModel, prompt: int, chunk: int) -> StepPlan:
    """Prefill of prompt tokens, at most MOST_TOKENS, in chunks of chunk tokens, which must divide prompt.

    Attention's work grows evenly from the first chunk to the last, so these two are compiled.
    """
    config, chunks, size = model.config, prompt // chunk, _whole_tiles(prompt)
    kv = _slots(model, PREFILL_KV, (2, size, config.num_kv_heads, config.head_dim))
    starts = sorted({0, prompt - chunk})
    ticks = [_compile_tick(model, prefill_layer(model, start, chunk), chunk, kv) for start in starts]
    embedding, head = _compile_ends(model, chunk, 1)
    costs = Counter({kind: (cost + ticks[-1].costs[kind]) * chunks // 2 for kind, cost in ticks[0].costs.items()})
    pairs = chunk * chunk * chunks * (chunks + 1) // 2
    sent = costs + head.costs + Counter({kind: cost * chunks for kind, cost in embedding.costs.items()})
    return _step_plan(model, kv, costs[FLOPS], sent, (*ticks, embedding, head), prompt, pairs)


def plan_decoding(model: StagedModel, batch: int, context: int) -> StepPlan:
    """One token for each of batch requests, which have context tokens each, at most MOST_TOKENS, the new one included;
    their pages are at most MOST_PAGES.
    """
    config, columns = model.config, pages_for(context)
    kv = _slots(model, PAGES, (batch * columns, 2, PAGE, config.num_kv_heads, config.head_dim))
    step = _compile_tick(model, decoding_layer(model, batch, context, columns), batch, kv)
    embedding, head = _compile_ends(model, batch, batch)
    sent = step.costs + embedding.costs + head.costs
    return _step_plan(model, kv, step.costs[FLOPS], sent, (step, embedding, head), batch, batch * context)


def pages_for(context: int) -> int:
    """Pages of a request with so many tokens, in whole tiles of attention."""
    tile = pages_per_tile(PAGE)
    return -(-context // (PAGE * tile)) * tile


def linear_factor(config: LlamaConfig) -> float:
    """b of l (a n^2 d + b n d^2): 25.5 for LLaMA2-70B, of which attention's projections 4.5 and the MLP 21."""
    heads = 4 * (config.num_heads + config.num_kv_heads) * config.head_dim
    return (heads + 6 * config.intermediate_size) / config.hidden_size


def formula_flops(config: LlamaConfig, tokens: int, pairs: int, b: float) -> float:
    """l (4 pairs d + b tokens d^2), where pairs of a query and a key are n^2 if all are computed."""
    attention = 4 * pairs * config.num_heads * config.head_dim
    return config.num_layers * (attention + b * tokens * config.hidden_size**2)


def pipeline_tick(model: StagedModel, layer: Layer) -> Callable:
    """One tick: every stage runs its layers and passes its activations on to the next.

    The function takes slots, x [pp, T, E] and each slot's KV [pp, ...]; gives each stage's output [pp, T, E], what
    each stage receives for the next tick [pp, T, E] (zeros at the first), and the KV.
    """
    slots, pp = len(model.slots), len(model.stages)
    held = np.array([[slot < len(stage) for slot in range(slots)] for stage in model.stages])
    layer = jax.jit(layer)  # so that it is traced once, not once a slot

    def tick(held: jax.Array, slots: tuple, x: jax.Array, kvs: tuple) -> tuple:
        own_held, x, filled = held[0], x[0], []
        for slot, inputs in enumerate(zip(slots, kvs, strict=True)):
            params, kv = jax.tree.map(lambda leaf: leaf[0], inputs)
            if len(model.stages) * (slot + 1) <= model.config.num_layers:
                x, kv = layer(params, x, kv)
            else:
                x, kv = jax.lax.cond(own_held[slot], layer, lambda _, *same: same, params, x, kv)
            filled.append(kv[None])
        following = [(stage, stage + 1) for stage in range(pp - 1)]
        received = jax.lax.ppermute(x, PP, following) if following else jnp.zeros_like(x)
        return x[None], received[None], tuple(filled)

    # Not checked: attention's loop starts from zeros, which are the same on all stages, and ends with what is not.
    specs = {"in_specs": P(PP), "out_specs": P(PP), "axis_names": {PP}, "check_vma": False}
    sharded_tick = jax.shard_map(tick, mesh=model.mesh, **specs)
    return lambda slots, x, kvs: sharded_tick(held, slots, x, kvs)


def prefill_layer(model: StagedModel, start: int, tokens: int) -> Layer:
    """A layer over the chunk at position start: x [tokens, E], kv [2, S, K, D]."""

    def layer(params: Params, x: jax.Array, kv: jax.Array) -> tuple[jax.Array, jax.Array]:
        stored = {}

        def attend(q: jax.Array, new: jax.Array) -> jax.Array:
            stored["kv"] = jax.lax.dynamic_update_slice_in_dim(kv, new, start, axis=1)
            return prefill_attention(q, stored["kv"], start)

        rotary = rotary_table(model.config, start + jnp.arange(tokens))
        return nnx.merge(model.layer_def, params)(x, rotary, attend), stored["kv"]

    return layer


def decoding_layer(model: StagedModel, batch: int, context: int, columns: int) -> Layer:
    """A layer over the newest of context tokens: x [batch, E], pages [batch * columns, 2, PAGE, K, D] in order."""

    last, row = divmod(context - 1, PAGE)

    def layer(params: Params, x: jax.Array, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Made by the program, not constants in it: they may be larger than this machine's memory.
        table = jnp.arange(batch * columns, dtype=jnp.int32).reshape(batch, columns)
        lengths = jnp.full(batch, context, jnp.int32)
        stored = {}

        def attend(q: jax.Array, new: jax.Array) -> jax.Array:
            stored["pages"] = pages.at[table[:, last], :, row].set(new.swapaxes(0, 1))
            return paged_attention(q, stored["pages"], table, lengths)

        rotary = rotary_table(model.config, lengths - 1)
        return nnx.merge(model.layer_def, params)(x, rotary, attend), stored["pages"]

    return layer


def _slots(model: StagedModel, spec: P, shape: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return (sharded(model.mesh, spec, (len(model.stages), *shape), model.dtype),) * len(model.slots)


def _whole_tiles(tokens: int) -> int:
    """What prefill_attention asks of a buffer for so many tokens."""
    return tokens if tokens <= TILE else -(-tokens // TILE) * TILE


def _compile_tick(model: StagedModel, layer: Layer, tokens: int, kv: tuple[jax.ShapeDtypeStruct, ...]) -> _Program:
    shape = (len(model.stages), tokens, model.config.hidden_size)
    x = sharded(model.mesh, ACTIVATIONS, shape, model.dtype)
    return _compile(jax.jit(pipeline_tick(model, layer), donate_argnums=2), model.slots, x, kv)


def _compile_ends(model: StagedModel, tokens: int, rows: int) -> tuple[_Program, _Program]:
    """The embedding of so many tokens, and the head's logits of so many rows."""
    whole = NamedSharding(model.mesh, P())

    def encode(params: Params, ids: jax.Array) -> jax.Array:
        return nnx.merge(model.embedder_def, params).encode(ids)

    def decode(params: Params, x: jax.Array) -> jax.Array:
        return nnx.merge(model.embedder_def, params).decode(x)

    ids = sharded(model.mesh, P(), (tokens,), jnp.int32)
    x = sharded(model.mesh, P(), (rows, model.config.hidden_size), model.dtype)
    embedding = _compile(jax.jit(encode, out_shardings=whole), model.embedder, ids)
    return embedding, _compile(jax.jit(decode, out_shardings=whole), model.embedder, x)


def _compile(function: Callable, *arguments: Any) -> _Program:
    begin = time.monotonic()
    lowered = function.lower(*arguments)
    lowered_at = time.monotonic()
    compiled = lowered.compile()
    end = time.monotonic()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return _Program(program_costs(compiled.as_text()), temporary, lowered_at - begin, end - lowered_at)


def _step_plan(
    model: StagedModel,
    kv: tuple[jax.ShapeDtypeStruct, ...],
    flops: int,
    sent: Counter,
    programs: tuple[_Program, ...],
    tokens: int,
    pairs: int,
) -> StepPlan:
    config = model.config
    tp = model.mesh.devices.size // len(model.stages)
    return StepPlan(
        kv_bytes=device_bytes(kv),
        temporary_bytes=max(program.temporary_bytes for program in programs),
        flops=flops,
        head_flops=programs[-1].costs[FLOPS],
        sent_bytes={kind: sent[kind] for kind in COLLECTIVES if sent[kind]},
        total_flops=flops / len(model.slots) * config.num_layers * tp,
        formula_flops=formula_flops(config, tokens, pairs, linear_factor(config)),
        paper_flops=formula_flops(config, tokens, pairs, PAPER_B),
        lower_s=sum(program.lower_s for program in programs),
        compile_s=sum(program.compile_s for program in programs),
    )
