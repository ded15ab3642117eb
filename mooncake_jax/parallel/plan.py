"""What prefill and decoding of a model cost on a pipeline's devices, from programs that are compiled but never run.

Prefill's programs are the engine's own (stage.py, boundary.py), compiled for jax.ShapeDtypeStructs, so that a model of
any size is planned for without its weights. One layer is compiled and counted as often as a stage has layers. Costs are
read from the compiled program of one device (hlo.py) and compared with the paper's l (a n^2 d + b n d^2) (section 5.1).
Knows nothing of requests and time.

Legend: T query tokens, S context tokens, B batch, N pages, P pages a request, K KV heads, D head dim, E width.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mooncake_jax.model.attention import TILE, paged_attention, pages_per_tile
from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.model.layers import rotary_table
from mooncake_jax.model.llama import Params
from mooncake_jax.model.loading import LoadedModel
from mooncake_jax.model.sampling import SamplingRows
from mooncake_jax.parallel.boundary import fit_program, permute_program
from mooncake_jax.parallel.decoding import again, product_rows
from mooncake_jax.parallel.hlo import COLLECTIVES, FLOPS, program_costs
from mooncake_jax.parallel.mesh import TP, stage_mesh
from mooncake_jax.parallel.pipeline import PipelineModel
from mooncake_jax.parallel.prefill import buffer_size, chunk_buckets
from mooncake_jax.parallel.sharding import BOUNDARY, PAGES, PREFILL_KV, device_bytes, sharded
from mooncake_jax.parallel.stage import StagePrograms, stage_programs

PAPER_B = 22  # what the paper takes for LLaMA2-70B
PAGE = 16  # tokens
MOST_CHUNK = 2**15  # tokens: attention's program grows with the chunk, and takes seconds to compile for so many
MOST_TOKENS = 2**31 - TILE - MOST_CHUNK  # of a request: positions are int32, those of a padded chunk's tiles too
MOST_PAGES = 2**31 - 1  # of a decoding step: their ids are int32


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
    total_flops: int
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


_Runs = list[tuple[_Program, Fraction | int]]  # programs, and how often each of them runs


@dataclass(frozen=True, slots=True)
class _Stage:
    """The devices whose programs are compiled: the last stage's, which also has both ends' parameters."""

    model: LoadedModel
    mesh: Mesh
    programs: StagePrograms

    def array(self, spec: P, dtype: jnp.dtype, *shape: int) -> jax.ShapeDtypeStruct:
        return sharded(self.mesh, spec, shape, dtype)

    def hidden(self, tokens: int) -> jax.ShapeDtypeStruct:
        return self.array(P(), self.model.dtype, tokens, self.model.config.hidden_size)


def plan_prefill(model: PipelineModel, prompt: int, chunk: int) -> StepPlan:
    """Prefill of prompt tokens, at most MOST_TOKENS, in chunks of chunk tokens, at most MOST_CHUNK.

    The formula's a is 2, since the engine skips tiles of keys that are masked. It computes those that are masked in
    part, and what pads the last chunk, whole.
    """
    stage, runs = _last_stage(model), _chunk_runs(prompt, chunk)
    config, dtype = stage.model.config, stage.model.dtype
    kv = stage.array(PREFILL_KV, dtype, 2, buffer_size(prompt, chunk), config.num_kv_heads, config.head_dim)
    layers = [(_compile_layer(stage, kv, start, bucket), times) for (start, bucket), times in runs.items()]
    embedded = Counter()
    for (_, bucket), times in runs.items():
        embedded[bucket] += times
    between = [(_compile_embedding(stage, bucket), times) for bucket, times in embedded.items()]
    for bucket, times in _passings(prompt, chunk, len(model.layers)).items():
        between += [(program, times) for program in _compile_passing(model, stage, bucket)]
    _, last = max(runs)
    head = _compile(
        stage.programs.finish, stage.model.embedder, stage.hidden(last), np.int32(0), SamplingRows.greedy(1)
    )
    return _step_plan(model, kv, layers, between, head, prompt, prompt * prompt / 2)


def plan_decoding(model: PipelineModel, batch: int, context: int) -> StepPlan:
    """One token for each of batch requests, which have context tokens each, at most MOST_TOKENS, the new one included;
    their pages are at most MOST_PAGES. Of the head it has the logits, which every device of the last stage gets.
    """
    stage, columns = _last_stage(model), pages_for(context)
    config, dtype = stage.model.config, stage.model.dtype
    stored = jnp.dtype("uint16") if dtype.itemsize == 2 else dtype  # as the engine keeps it: see read_pages
    pages = stage.array(PAGES, stored, batch * columns, 2, PAGE, config.num_kv_heads, config.head_dim)
    rows = product_rows(batch, dtype)
    whole = NamedSharding(stage.mesh, P())
    layer = jax.jit(
        decoding_layer(stage.model, batch, context), donate_argnums=(1, 2), out_shardings=(whole, pages.sharding)
    )
    layers = [(_compile(layer, stage.model.layers[0], stage.hidden(rows), pages), 1)]
    between = [(_compile_embedding(stage, rows), 1)]
    if (passings := len(model.layers) - 1) > 0:
        between += [(program, passings) for program in _compile_passing(model, stage, rows)]
    logits = jax.jit(lambda params, x: nnx.merge(stage.model.embedder_def, params).decode(x), out_shardings=whole)
    head = _compile(logits, stage.model.embedder, stage.hidden(rows))
    return _step_plan(model, pages, layers, between, head, batch, batch * context)


def pages_for(context: int) -> int:
    """Pages of a request with so many tokens, in whole tiles of attention."""
    tile = pages_per_tile(PAGE)
    return -(-context // (PAGE * tile)) * tile


def linear_factor(config: LlamaConfig) -> float:
    """b of l (a n^2 d + b n d^2): 25.5 for LLaMA2-70B, of which attention's projections 4.5 and the MLP 21."""
    heads = 4 * (config.num_heads + config.num_kv_heads) * config.head_dim
    return (heads + 6 * config.intermediate_size) / config.hidden_size


def formula_flops(config: LlamaConfig, tokens: int, pairs: float, b: float) -> float:
    """l (4 pairs d + b tokens d^2), where pairs of a query and a key are n^2 (a = 4) if all are computed, and half of
    it (a = 2) if masked ones are not.
    """
    attention = 4 * pairs * config.num_heads * config.head_dim
    return config.num_layers * (attention + b * tokens * config.hidden_size**2)


def prefill_layer(programs: StagePrograms, start: int) -> Callable:
    """The engine's function of a layer for chunks at position start alone, of which the compiler knows how often
    attention's loops turn: parameters, x [T, E], kv [2, S, K, D] and the rotary table -> x, kv, the chunk's own.
    """

    def layer(params: Params, x: jax.Array, kv: jax.Array, rotary: jax.Array) -> tuple:
        return programs.layer(params, x, kv, rotary, np.int32(start))

    return jax.jit(layer, donate_argnums=(1, 2))


def decoding_layer(model: LoadedModel, batch: int, context: int) -> Callable:
    """A layer over the newest of context tokens of each request: parameters, x [rows, E] (decoding.product_rows), pages
    [B * P, 2, PAGE, K, D] in the order of requests -> x, pages.

    Not the engine's function, which is made for one device: on CPUs its attention takes a token's KV heads as one, for
    several times the products, and cut over tp it would gather them. This one attends as the engine does elsewhere.
    """
    columns, (last, row) = pages_for(context), divmod(context - 1, PAGE)

    def layer(params: Params, x: jax.Array, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Made by the program, not constants in it: they may be larger than this machine's memory.
        table = jnp.arange(batch * columns, dtype=jnp.int32).reshape(batch, columns)
        lengths = jnp.full(batch, context, jnp.int32)
        stored = {}

        def attend(q: jax.Array, kv: jax.Array) -> jax.Array:
            new = jax.lax.bitcast_convert_type(kv[:, :batch], pages.dtype)
            stored["pages"] = pages.at[table[:, last], :, row].set(new.swapaxes(0, 1))
            return again(paged_attention(q[:batch], stored["pages"], table, lengths), len(q))

        rotary = rotary_table(model.config, again(lengths - 1, len(x)))
        return nnx.merge(model.layer_def, params)(x, rotary, attend), stored["pages"]

    return layer


def _last_stage(model: PipelineModel) -> _Stage:
    last = len(model.layers) - 1
    mesh = stage_mesh(model.mesh, last)
    return _Stage(model.held[last], mesh, stage_programs(model.held[last], mesh))


def _chunk_runs(prompt: int, chunk: int) -> dict[tuple[int, int], Fraction]:
    """(position, padded tokens) of the chunks to compile -> how many of the prompt's each stands for.

    Attention's work grows from one whole chunk to the next by the same amount, to within a tile, so that the first and
    the last stand for half of them each.
    """
    (whole, rest), buckets = divmod(prompt, chunk), chunk_buckets(chunk)
    runs = Counter()
    for start in (0, (whole - 1) * chunk) if whole else ():
        runs[start, buckets[-1]] += Fraction(whole, 2)
    if rest:
        runs[whole * chunk, next(bucket for bucket in buckets if bucket >= rest)] += Fraction(1)
    return runs


def _passings(prompt: int, chunk: int, stages: int) -> Counter:
    """Padded tokens -> how often all stages pass on so many: once in every tick in which a chunk moves, as much as the
    longest that does, whoever has one.
    """
    if stages == 1:
        return Counter()
    (whole, rest), buckets = divmod(prompt, chunk), chunk_buckets(chunk)
    if not rest:
        return Counter({buckets[-1]: whole + stages - 2})
    # The last, shorter chunk moves alone once, or all the way where it is the only one.
    last = next(bucket for bucket in buckets if bucket >= rest)
    return Counter({last: 1 if whole else stages - 1}) + Counter({buckets[-1]: whole + stages - 2 if whole else 0})


def _compile_layer(stage: _Stage, kv: jax.ShapeDtypeStruct, start: int, tokens: int) -> _Program:
    rotary = stage.array(P(), jnp.dtype("float32"), 2, tokens, 1, stage.model.config.head_dim // 2)
    function = prefill_layer(stage.programs, start)
    return _compile(function, stage.model.layers[0], stage.hidden(tokens), kv, rotary)


def _compile_embedding(stage: _Stage, tokens: int) -> _Program:
    return _compile(stage.programs.embed, stage.model.embedder, stage.array(P(), jnp.dtype("int32"), tokens))


def _compile_passing(model: PipelineModel, stage: _Stage, tokens: int) -> tuple[_Program, _Program]:
    """What passes hidden states on from stage to stage, and what puts them together there."""
    width, dtype = stage.model.config.hidden_size, stage.model.dtype
    sent = sharded(model.mesh, BOUNDARY, (len(model.layers) * tokens, width), dtype)
    together = fit_program(NamedSharding(stage.mesh, P()))
    received = stage.array(P(None, TP), dtype, tokens, width)
    return _compile(permute_program(model.mesh), sent), _compile(together, received, tokens)


def _compile(function: Callable, *arguments: Any) -> _Program:
    begin = time.monotonic()
    lowered = function.lower(*arguments)
    lowered_at = time.monotonic()
    compiled = lowered.compile()
    end = time.monotonic()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return _Program(program_costs(compiled.as_text()), temporary, lowered_at - begin, end - lowered_at)


def _sum(runs: _Runs, kind: str) -> int:
    return int(sum(program.costs[kind] * times for program, times in runs))


def _step_plan(
    model: PipelineModel,
    kv: jax.ShapeDtypeStruct,
    layers: _Runs,
    between: _Runs,
    head: _Program,
    tokens: int,
    pairs: float,
) -> StepPlan:
    """From what one layer costs, its kv, and the programs that run but once in a stage."""
    config, longest = model.held[0].config, max(map(len, model.layers))
    once = [*between, (head, 1)]
    programs = [program for program, _ in [*layers, *once]]
    sent = {kind: longest * _sum(layers, kind) + _sum(once, kind) for kind in COLLECTIVES}
    flops = _sum(layers, FLOPS)
    return StepPlan(
        kv_bytes=longest * device_bytes(kv),
        temporary_bytes=max(program.temporary_bytes for program in programs),
        flops=longest * flops,
        head_flops=head.costs[FLOPS],
        sent_bytes={kind: count for kind, count in sent.items() if count},
        total_flops=flops * config.num_layers * (model.mesh.devices.size // len(model.layers)),
        formula_flops=formula_flops(config, tokens, pairs, linear_factor(config)),
        paper_flops=formula_flops(config, tokens, pairs, PAPER_B),
        lower_s=sum(program.lower_s for program in programs),
        compile_s=sum(program.compile_s for program in programs),
    )
