"""The decoding engine: continuous batching over paged KV (paper section 3, step 4).

Requests join with the KV that prefill computed and leave when their owner says so; every step adds one token to each. A
step is one compiled call for the whole model. Batches are padded to powers of two and a request's pages are found
through a table, so requests come and go without compiling anything. Knows nothing of stop tokens, limits or ranks.

Legend: B batch, S context tokens, L layers, N pages, K KV heads, D head dim, E width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mooncake_jax.model.attention import pages_per_tile
from mooncake_jax.model.layers import rotary_table
from mooncake_jax.model.llama import Embedder
from mooncake_jax.model.loading import LoadedModel, Params
from mooncake_jax.model.sampling import NO_TOKEN, SamplingRows, logprobs, sample
from mooncake_jax.parallel.attention import attend_pages
from mooncake_jax.request import Sampling, TokenLogprobs

_SCRATCH = 0  # the page that padding rows and padding pages write to; no request owns it


class CapacityError(RuntimeError):
    """A request does not fit into the engine's slots or pages; nothing has changed by asking."""


@dataclass(slots=True)
class _Running:
    """A request in the batch: the pages it owns, the tokens whose KV is in them, and its newest token."""

    pages: list[int]
    context: int
    max_context: int
    token: int
    sampling: Sampling
    outputs: int = 1  # output tokens so far, the first one included
    logprobs: TokenLogprobs | None = None  # of the newest token

    @property
    def finite(self) -> bool:
        """Whether its KV is known to hold numbers: a step has read all of it, and found them."""
        return self.outputs > 1 and self.token != NO_TOKEN


class _Rows(NamedTuple):
    """What a step needs to know of each request in it, on the device from one step to the next."""

    tokens: jax.Array  # int32 [B]; the newest of each request
    positions: jax.Array  # int32 [B]; where it stands
    table: jax.Array  # int32 [B, P]; the request's pages
    sampling: SamplingRows
    logprobs: jax.Array  # bool; whether any request asked for them


@dataclass(frozen=True, slots=True, eq=False)
class StagedKV:
    """A prompt's KV on the device, not in pages yet: of each layer [2, P * page, K, D], P pages with the padding."""

    layers: tuple[jax.Array, ...]
    tokens: int


class DecodingEngine:
    """One model's batch and its pages. Not thread-safe but for stage(): one thread joins, steps and leaves."""

    def __init__(self, model: LoadedModel, max_batch: int, page_size: int, num_pages: int):
        """num_pages, of page_size tokens each, are the requests' to use; one more is kept as scratch."""
        for name, value in (("max_batch", max_batch), ("page_size", page_size), ("num_pages", num_pages)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        config = model.config
        self._model, self._max_batch, self._page = model, max_batch, page_size
        shape = (config.num_layers, num_pages + 1, 2, page_size, config.num_kv_heads, config.head_dim)
        # bfloat16 is kept as its bits: see read_pages.
        self._stored = np.dtype(np.uint16) if model.dtype.itemsize == 2 else np.dtype(model.dtype)
        self._pages = jnp.zeros(shape, self._stored)
        self._free = list(range(num_pages, _SCRATCH, -1))
        self._num_pages = num_pages
        tile = pages_per_tile(page_size)
        self._table_width = -(-min(num_pages, self.pages_for(config.max_context)) // tile) * tile
        self._shapes: set[tuple[str, int]] = set()
        self._running: dict[int, _Running] = {}
        self._rows: tuple[list[int], _Rows] | None = None  # of the last step's requests; None when one joined or left
        leaves, structure = jax.tree.flatten((model.embedder, model.layers))
        self._weights = _pack(leaves)
        self._step = jax.jit(partial(_step, model, structure), donate_argnums=1)
        self._write = jax.jit(_write, donate_argnums=0)

    @property
    def dtype(self) -> np.dtype:
        return self._model.dtype

    @property
    def compile_count(self) -> int:
        """Shapes compiled so far: of steps and of fillings of pages, at most one for each power of two."""
        return len(self._shapes)

    def pages_for(self, tokens: int) -> int:
        """Pages that so many tokens of context occupy."""
        return -(-tokens // self._page)

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def warm_up(self) -> None:
        """Compiles the step for every batch size and the filling of pages for every prompt length."""
        size = 1
        while True:
            jax.block_until_ready(self._call(self._make_rows([], size)))
            if size >= self._max_batch:
                break
            size *= 2
        config = self._model.config
        pages = min(self._num_pages, self.pages_for(config.max_context))
        for power in range((pages - 1).bit_length() + 1):
            tokens = min(self._page << power, config.max_context)
            kv = np.zeros((config.num_layers, 2, tokens, config.num_kv_heads, config.head_dim), self._model.dtype)
            self._fill([_SCRATCH] * self.pages_for(tokens), self.stage(kv))

    def stage(self, kv: np.ndarray) -> StagedKV:
        """Copies a prompt's KV [L, 2, S, K, D] to the device, and waits until it is there: the part of join() that
        needs neither batch nor pages, so that another thread can do it while this one steps.

        kv's memory may be used again after the call. Raises ValueError if it does not fit the model.
        """
        self._check_kv(kv)
        bucket = 1 << (self.pages_for(kv.shape[2]) - 1).bit_length()
        layers = []
        for layer in kv:
            # Fresh memory for each layer: JAX may use it uncopied.
            data = np.zeros((2, bucket * self._page, *layer.shape[2:]), self._stored)
            data[:, : layer.shape[1]] = layer.view(self._stored)
            layers.append(jax.device_put(data))
        return StagedKV(tuple(jax.block_until_ready(layers)), kv.shape[2])

    def join(
        self,
        request_id: int,
        kv: np.ndarray | StagedKV,
        first_token: int,
        max_context_tokens: int,
        sampling: Sampling = Sampling(),
    ) -> None:
        """Adds a request whose prompt's KV is kv [L, 2, S, K, D], or what stage() made of it, and whose first output
        token prefill has sampled.

        Takes pages for max_context_tokens (prompt and output together) at once, so that a request in the batch can
        always finish. kv is copied: after the call the caller may reuse its memory. Raises CapacityError if slots or
        pages lack, ValueError if the request is in the batch already, or kv, first_token or max_context_tokens do not
        fit the model.
        """
        staged = kv if isinstance(kv, StagedKV) else self.stage(kv)
        tokens = staged.tokens
        self._check_join(request_id, tokens, first_token, max_context_tokens)
        needed = self.pages_for(max_context_tokens)
        if len(self._running) >= self._max_batch:
            raise CapacityError(
                f"request {request_id}: all {self._max_batch} slots are taken; wait until a request leaves"
            )
        if needed > len(self._free):
            raise CapacityError(
                f"request {request_id}: {max_context_tokens} tokens need {needed} pages, {len(self._free)} are free; "
                "wait until a request leaves"
            )
        pages = [self._free.pop() for _ in range(needed)]
        self._fill(pages[: self.pages_for(tokens)], staged)
        self._running[request_id] = _Running(pages, tokens, max_context_tokens, first_token, sampling)
        self._rows = None

    def step(self, request_ids: Sequence[int] | None = None) -> dict[int, int]:
        """Generates one token for each of these requests (all in the batch if None): request id -> token, or NO_TOKEN
        where the model's logits are no numbers.

        Raises CapacityError, with nothing changed, if a request has reached its max_context_tokens and did not leave,
        KeyError if one is not in the batch.
        """
        stepping = {i: self._running[i] for i in (self._running if request_ids is None else request_ids)}
        if not stepping:
            return {}
        for request_id, request in stepping.items():
            if request.context >= request.max_context:
                raise CapacityError(
                    f"request {request_id}: all its {request.max_context} tokens are generated; let it leave"
                )
        ids, running = list(stepping), list(stepping.values())
        if self._rows is None or self._rows[0] != ids:
            self._rows = ids, self._make_rows(running, 1 << (len(running) - 1).bit_length())
        following, taken = self._call(self._rows[1])
        tokens = np.asarray(following.tokens).tolist()
        for request, token in zip(running, tokens, strict=False):
            request.context, request.outputs, request.token = request.context + 1, request.outputs + 1, token
        self._rows = ids, following
        if _want_logprobs(running):
            _keep_logprobs(running, *jax.device_get(taken))
        return dict(zip(ids, tokens, strict=False))

    def logprobs(self, request_id: int) -> TokenLogprobs | None:
        """Those of the request's newest token; None before its first step or if it did not ask for them. Raises
        KeyError if it is not in the batch.
        """
        return self._running[request_id].logprobs

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._running

    def leave(self, request_id: int) -> None:
        """Takes a request out of the batch and frees its pages. Raises KeyError if it is not in it."""
        request = self._running.pop(request_id)
        if not request.finite:
            self._clear(request.pages)
        self._free.extend(reversed(request.pages))
        self._rows = None

    def check(self) -> None:
        """Asserts that every page is free or owned by one request, and that no request outgrew its pages."""
        owned = [page for request in self._running.values() for page in request.pages]
        assert sorted(owned + self._free) == list(range(1, self._num_pages + 1)), "a page is lost or taken twice"
        assert len(self._running) <= self._max_batch, "more requests than slots"
        for request_id, request in self._running.items():
            assert len(request.pages) == self.pages_for(request.max_context), (
                f"{request_id} has a wrong number of pages"
            )
            assert 1 <= request.context <= request.max_context, f"{request_id} outgrew its pages"

    def _check_kv(self, kv: np.ndarray) -> None:
        config = self._model.config
        wanted = (config.num_layers, 2, kv.shape[2], config.num_kv_heads, config.head_dim)
        if kv.shape != wanted or kv.dtype != self._model.dtype or kv.shape[2] < 1:
            raise ValueError(f"kv is {kv.dtype} {list(kv.shape)}; needed is {self._model.dtype} {list(wanted)}")

    def _check_join(self, request_id: int, tokens: int, first_token: int, max_context_tokens: int) -> None:
        config = self._model.config
        if request_id in self._running:
            raise ValueError(f"request {request_id} is in the batch already; it must leave before it joins again")
        if not 0 <= first_token < config.vocab_size:
            raise ValueError(
                f"request {request_id}: first_token is {first_token}; this model knows 0 to {config.vocab_size - 1}"
            )
        if not tokens < max_context_tokens <= config.max_context:
            raise ValueError(
                f"request {request_id}: max_context_tokens is {max_context_tokens}; with a prompt of {tokens} tokens "
                f"it must lie within {tokens + 1} and {config.max_context}, the model's context"
            )

    def _clear(self, pages: Sequence[int]) -> None:
        """Attention multiplies what is behind a request's end in its pages by 0, which makes NaN of what is NaN."""
        config = self._model.config
        layer = np.zeros((2, len(pages) * self._page, config.num_kv_heads, config.head_dim), self._model.dtype)
        self._fill(pages, self.stage(np.broadcast_to(layer, (config.num_layers, *layer.shape))))

    def _fill(self, pages: Sequence[int], kv: StagedKV) -> None:
        """Writes a prompt's KV into pages, layer by layer; their number is padded so that few shapes are compiled."""
        bucket = kv.layers[0].shape[1] // self._page
        self._shapes.add(("fill", bucket))
        ids = np.full(bucket, _SCRATCH, np.int32)
        ids[: len(pages)] = pages
        for i, layer in enumerate(kv.layers):
            self._pages = self._write(self._pages, np.int32(i), ids, layer)

    def _make_rows(self, running: list[_Running], size: int) -> _Rows:
        """The requests' rows, padded to size."""
        # Padding rows stand before all others, from step to step, and so never outgrow the table.
        tokens, positions = np.zeros((2, size), np.int32)
        table = np.full((size, self._table_width), _SCRATCH, np.int32)
        sampling = SamplingRows.greedy(size)
        for row, request in enumerate(running):
            tokens[row], positions[row] = request.token, request.context
            table[row, : len(request.pages)] = request.pages
            sampling.fill(row, request.sampling, request.outputs)
        return jax.device_put(_Rows(tokens, positions, table, sampling, np.asarray(_want_logprobs(running))))

    def _call(self, rows: _Rows) -> tuple[_Rows, tuple[jax.Array, ...]]:
        """Runs the compiled step: the rows for the next one, with the tokens it generated, and their logprobs."""
        self._shapes.add(("step", len(rows.tokens)))
        (tokens, positions, index, taken), self._pages = self._step(self._weights, self._pages, rows)
        sampling = rows.sampling._replace(index=index)
        return rows._replace(tokens=tokens, positions=positions, sampling=sampling), taken


def _want_logprobs(running: list[_Running]) -> bool:
    return any(request.sampling.logprobs is not None for request in running)


def _keep_logprobs(running: list[_Running], taken: np.ndarray, top: np.ndarray, ids: np.ndarray) -> None:
    for row, request in enumerate(running):
        likeliest = tuple(zip(ids[row].tolist(), top[row].tolist(), strict=True))
        request.logprobs = TokenLogprobs(float(taken[row]), likeliest).limited(request.sampling.logprobs)


def _write(pages: jax.Array, layer: jax.Array, ids: jax.Array, kv: jax.Array) -> jax.Array:
    """pages [L, N, 2, page, K, D] with a layer's kv [2, P * page, K, D] written to those that ids [P] name."""
    cut = kv.reshape(2, ids.shape[0], *pages.shape[3:])
    return pages.at[layer, ids].set(cut.swapaxes(0, 1))


def _pack(leaves: Sequence[jax.Array]) -> tuple[list[jax.Array | None], jax.Array]:
    """Weights as a step takes them: a flat list, with the norms' vectors [E] taken out and stacked.

    JAX walks them at every step and looks at each: nested and one by one they take half as long again.
    """
    return [leaf if leaf.ndim > 1 else None for leaf in leaves], jnp.stack([leaf for leaf in leaves if leaf.ndim == 1])


def _unpack(leaves: Sequence[jax.Array | None], vectors: jax.Array) -> list[jax.Array]:
    rows = iter(vectors)
    return [next(rows) if leaf is None else leaf for leaf in leaves]


def _step(
    model: LoadedModel,
    structure: jax.tree_util.PyTreeDef,
    weights: tuple[list[jax.Array | None], jax.Array],
    pages: jax.Array,
    requests: _Rows,
) -> tuple[tuple, jax.Array]:
    """Next tokens, positions, and sampling indices, each [B], the tokens' logprobs, and the pages with the newest
    tokens' KV in them.
    """
    tokens, positions, table, sampling, wanted = requests
    embedder_params, layers = jax.tree.unflatten(structure, _unpack(*weights))
    embedder: Embedder = nnx.merge(model.embedder_def, embedder_params)
    rows = product_rows(len(tokens), model.dtype)
    # The barrier keeps XLA from computing cosines and sines anew in every layer.
    rotary = jax.lax.optimization_barrier(rotary_table(model.config, again(positions, rows)))
    x, (count, of_a_layer, *page) = embedder.encode(again(tokens, rows)), pages.shape
    all_pages = pages.reshape(-1, *page)
    layer = jax.jit(partial(_layer, model.layer_def))  # so that JAX traces it once, not once a layer
    for i in range(count):
        x, all_pages = layer(layers[i], x, all_pages, rotary, table + i * of_a_layer, positions)
    logits = embedder.decode(x)[: len(tokens)]
    following = sample(logits, sampling)
    taken = logprobs(logits, following, wanted)
    return (following, positions + 1, sampling.index + 1, taken), all_pages.reshape(pages.shape)


def product_rows(batch: int, dtype: jnp.dtype) -> int:
    """How many rows of hidden states a batch has: one a request, but never one alone in bfloat16, whose product takes
    ten times as long on CPUs as that of two.
    """
    return max(batch, 2 if dtype.itemsize == 2 else 1)


def again(x: jax.Array, rows: int) -> jax.Array:
    """x with its first rows once more behind the last, so that there are so many."""
    return x if len(x) == rows else x[np.arange(rows) % len(x)]


def _layer(
    layer_def: nnx.GraphDef,
    params: Params,
    x: jax.Array,
    pages: jax.Array,
    rotary: jax.Array,
    table: jax.Array,
    positions: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """One layer over the newest token of each request: x [rows, E] (see _rows), all pages [L * N, 2, page, K, D] and
    the table [B, P] of this layer's -> x, the pages with the tokens' KV written to them.
    """
    page, (batch, _) = pages.shape[2], table.shape
    ids = jnp.take_along_axis(table, (positions // page)[:, None], axis=1)[:, 0]
    # One row is written twice: XLA makes an update slice of a single write, and on CPUs copies all pages around it.
    written = max(batch, 2)
    stored = {}

    def attend(q: jax.Array, kv: jax.Array) -> jax.Array:
        new = kv if kv.dtype == pages.dtype else jax.lax.bitcast_convert_type(kv, pages.dtype)
        new = again(new.swapaxes(0, 1)[:batch], written)
        where = again(ids, written), slice(None), again(positions % page, written)
        stored["pages"] = pages.at[where].set(new, mode="promise_in_bounds")
        return again(attend_pages(q[:batch], stored["pages"], table, positions + 1), len(q))

    x = nnx.merge(layer_def, params)(x, rotary, attend)
    return x, stored["pages"]
