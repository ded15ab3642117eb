"""The prefill engine: prompts chunk by chunk through the stages of a pipeline (paper sections 3 and 5).

A model on one host is a pipeline of one stage. Chunks are padded to a few lengths and the KV buffer to powers of two,
which bounds what is compiled; attention's work follows the true length. Where other processes hold other stages, all
call the engine alike: for the same prompts in the same order, each with hooks for its own layers. Knows nothing of
blocks, pools or ranks: hooks do.

Legend: T query tokens, S context tokens, K KV heads, D head dim, E width.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from mooncake_jax.model.attention import TILE
from mooncake_jax.model.loading import LoadedModel
from mooncake_jax.model.sampling import NO_TOKEN, NOT_FINITE, SamplingRows
from mooncake_jax.parallel.boundary import Boundary
from mooncake_jax.parallel.mesh import stage_mesh
from mooncake_jax.parallel.pipeline import PipelineModel
from mooncake_jax.parallel.processes import wait_for_all
from mooncake_jax.parallel.schedule import plan_chunks, ticks
from mooncake_jax.parallel.stage import Chunk, LoadLayer, OnLayer, PrefillJob, Stage
from mooncake_jax.request import Sampling, TokenLogprobs

_SHORTEST_CHUNK = 16  # also keeps bfloat16 products from having one row, which is ten times slower than two on CPUs
_SHORTEST_BUFFER = 512


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first output token, the ten most likely ones as (id, logit), highest first, and log-probabilities."""

    token: int
    top_logits: tuple[tuple[int, float], ...]
    logprobs: TokenLogprobs


class PrefillEngine:
    """Computes prompts of one model. Holds no state between requests but compiled code."""

    def __init__(self, model: LoadedModel | PipelineModel, prefill_chunk: int):
        """model: whole on one device, or cut into stages of which this process holds some."""
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk is {prefill_chunk}; it must be at least 1 token")
        self._chunk = prefill_chunk
        self._buckets = chunk_buckets(prefill_chunk)
        self._shapes: set[tuple[int, int]] = set()
        if isinstance(model, LoadedModel):
            self._model, self._stage_count, self._boundary = model, 1, None
            self._stages = {0: Stage(model, range(model.config.num_layers), None)}
            return
        self._model, self._stage_count = next(iter(model.held.values())), len(model.layers)
        self._stages = {
            number: Stage(held, model.layers[number], stage_mesh(model.mesh, number))
            for number, held in sorted(model.held.items())
        }
        width = self._model.config.hidden_size
        several = self._stage_count > 1
        self._boundary = Boundary(model.mesh, self._stages, width, self._model.dtype) if several else None

    @property
    def dtype(self) -> np.dtype:
        return self._model.dtype

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that this process computes, for which hooks are called."""
        return tuple(number for stage in self._stages.values() for number in stage.layers)

    @property
    def compile_count(self) -> int:
        """Shapes (chunk, buffer) compiled so far: at most len(chunk_buckets(prefill_chunk)) for each power of two."""
        return len(self._shapes)

    def warm_up(self, longest_prompt: int = _SHORTEST_BUFFER) -> None:
        """Compiles whatever prompts of up to longest_prompt tokens need, whatever prefix is reused."""
        power = _SHORTEST_BUFFER
        while True:
            longest = self._bucket(min(power, self._chunk))
            for bucket in self._buckets[: self._buckets.index(longest) + 1]:
                self._warm_up_stages(bucket, buffer_size(power, self._chunk))
            if power >= longest_prompt:
                break
            power *= 2
        if self._boundary is not None:
            wait_for_all("stages are compiled")
            self._warm_up_boundary(self._buckets[: self._buckets.index(longest) + 1])

    def prefill(
        self,
        prompt_ids: Sequence[int],
        *,
        prefix_len: int = 0,
        load_layer: LoadLayer | None = None,
        on_layer: OnLayer | None = None,
        sampling: Sampling = Sampling(),
    ) -> FirstToken | None:
        """Computes tokens prefix_len .. n - 1 of the prompt and samples the first output token; None where another
        process holds the last stage.

        load_layer(i) is called once, before layer i of the first chunk, if prefix_len > 0. on_layer(i, start, kv) is
        called as soon as layer i of a chunk has been dispatched: the new KV may still be under way, and it is the
        hook, or the thread it hands kv to, who waits (see LayerKV). Hooks run in this thread and should return soon;
        what they raise passes through and, on one process, leaves the engine usable.

        Raises ValueError for an empty or too long prompt, an id out of vocabulary, or a prefix that is not within 0
        .. n - 1, ArithmeticError if the logits are no numbers.
        """
        job = self.job(prompt_ids, prefix_len, load_layer, on_layer, sampling)
        [(_, result)] = self.run(self.chunks(job))
        return None if result is None else result()

    def job(
        self,
        prompt_ids: Sequence[int],
        prefix_len: int = 0,
        load_layer: LoadLayer | None = None,
        on_layer: OnLayer | None = None,
        sampling: Sampling = Sampling(),
    ) -> PrefillJob:
        """A prompt for chunks and run, with the arguments and errors of prefill."""
        ids = np.asarray(prompt_ids, np.int64)
        self._check(ids, prefix_len, load_layer)
        rows = SamplingRows.greedy(1)
        rows.fill(0, sampling, 0)
        return PrefillJob(ids, prefix_len, load_layer, on_layer, rows, buffer_size(len(ids), self._chunk))

    def chunks(self, job: PrefillJob) -> list[Chunk]:
        plan = plan_chunks(len(job.ids), job.prefix_len, self._chunk)
        return [Chunk(job, start, tokens, self._bucket(tokens)) for start, tokens in plan]

    def run(self, entering: Iterable[Chunk | None]) -> Iterator[tuple[PrefillJob, Callable[[], FirstToken] | None]]:
        """Computes chunks of successive prompts, which enter the pipeline one a tick (schedule.ticks).

        Gives each prompt when this process has dispatched all it has to do for it, with a function that waits for the
        first token and returns it; None where another process holds the last stage. All processes must go through to
        the end: the others' ticks need them.
        """
        last, last_held, received = self._stage_count - 1, max(self._stages), {}
        for tick in ticks(entering, self._stage_count):
            passed, done = {}, []
            for number, chunk in [(number, tick[number]) for number in self._stages if tick[number] is not None]:
                x = self._compute(number, chunk, received)
                if number < last:
                    passed[number] = x
                if chunk.last and number == last_held:
                    done.append((chunk.job, self._first_token(chunk, x) if number == last else None))
            moving = [chunk.bucket for chunk in tick[:-1] if chunk is not None]
            if moving:
                received = self._boundary.pass_on(passed, max(moving))
            yield from done

    def _compute(self, number: int, chunk: Chunk, received: Mapping[int, jax.Array]) -> jax.Array:
        stage = self._stages[number]
        self._shapes.add((chunk.bucket, chunk.job.buffer))
        x = stage.embed(chunk) if number == 0 else self._boundary.whole(number, received[number], chunk.bucket)
        return stage.compute(chunk, x)

    def _first_token(self, chunk: Chunk, x: jax.Array) -> Callable[[], FirstToken]:
        """From the last chunk's hidden states in the last stage."""
        computed = self._stages[self._stage_count - 1].finish(x, chunk.tokens - 1, chunk.job.sampling)
        return partial(first_token, computed)

    def _warm_up_stages(self, bucket: int, buffer: int) -> None:
        self._shapes.add((bucket, buffer))
        job = PrefillJob(np.zeros(bucket, np.int64), 0, None, None, SamplingRows.greedy(1), buffer)
        chunk = Chunk(job, 0, bucket, bucket)
        for number, stage in self._stages.items():
            x = stage.embed(chunk) if number == 0 else self._boundary.zeros(number, bucket)
            x = stage.compute_one(chunk, x)
            jax.block_until_ready(stage.finish(x, 0, job.sampling) if number == self._stage_count - 1 else x)

    def _warm_up_boundary(self, buckets: Sequence[int]) -> None:
        """A chunk of any bucket beside one of any longer bucket in another stage."""
        for place, longest in enumerate(buckets):
            for bucket in buckets[: place + 1]:
                outputs = {number: self._boundary.zeros(number, bucket) for number in self._stages}
                for number, received in self._boundary.pass_on(outputs, longest).items():
                    self._boundary.whole(number, received, bucket)

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


def buffer_size(tokens: int, prefill_chunk: int) -> int:
    """Tokens that a prompt's KV buffers have room for: a power of two, and the padding of a chunk that starts anywhere,
    in whole tiles of attention.
    """
    power = max(_SHORTEST_BUFFER, 1 << (tokens - 1).bit_length())
    return power + -(-chunk_buckets(prefill_chunk)[-1] // TILE) * TILE


def chunk_buckets(prefill_chunk: int) -> tuple[int, ...]:
    """Lengths that chunks are padded to: powers of two, and the longest chunk itself (at least 16)."""
    longest = max(prefill_chunk, _SHORTEST_CHUNK)
    powers = [_SHORTEST_CHUNK << i for i in range(longest.bit_length())]
    return (*(power for power in powers if power < longest), longest)


def first_token(computed: tuple) -> FirstToken:
    """Waits for what Stage.finish gives. Raises ArithmeticError if the logits are no numbers."""
    token, values, (logprob, top_logprobs, top) = jax.device_get(computed)
    if token == NO_TOKEN:
        raise ArithmeticError(NOT_FINITE)
    likeliest = tuple(zip(top[0].tolist(), top_logprobs[0].tolist(), strict=True))
    top_logits = tuple(zip(top[0].tolist(), values.tolist(), strict=False))
    return FirstToken(int(token), top_logits, TokenLogprobs(float(logprob[0]), likeliest))
