"""The hardware of a decoding instance: host memory that KVCache streams into, and the decoding engine (report 3,
steps 3 and 4). Where prefills are inlined it has a prefill engine as well, on the same weights (report 5).

KVCache moves to the device on a thread of its own while others decode; only that it is written into their pages holds
up a step.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from mooncake_jax.cache.store import BlockLayout
from mooncake_jax.cluster.control import KVCacheSent, KVPiece
from mooncake_jax.model.sampling import NO_TOKEN, NOT_FINITE
from mooncake_jax.model.stopping import StopStrings
from mooncake_jax.parallel.decoding import DecodingEngine, StagedKV
from mooncake_jax.parallel.prefill import PrefillEngine
from mooncake_jax.request import Request
from mooncake_jax.sched.actions import Action, DropKVCache, InlinePrefill, LoadKVCache, RunStep
from mooncake_jax.sched.messages import (
    DecodingFailed,
    KVCacheLoaded,
    KVCacheReceived,
    Message,
    PrefillFailed,
    PrefillInlined,
    StepDone,
    StepFailed,
)


@dataclass(slots=True)
class _Arrival:
    """KVCache of one dispatch in host memory: [L, 2, prompt tokens, K, D], filled piece by piece."""

    kv: np.ndarray
    landed: int = 0  # tokens x layers
    sent: KVCacheSent | None = None

    @property
    def complete(self) -> bool:
        return self.sent is not None and self.landed == self.kv.shape[0] * self.kv.shape[2]


class DecodingHardware:
    """decode: token ids to text, needed by requests with stop strings only; prefill: None where none is inlined."""

    def __init__(
        self,
        node: str,
        engine: DecodingEngine,
        layout: BlockLayout,
        decode: Callable[[Sequence[int]], str] | None,
        post: Callable[[Message], None],
        prefill: PrefillEngine | None = None,
    ):
        self.node, self._engine, self._layout, self._decode, self._post = node, engine, layout, decode, post
        self._prefill = prefill
        self._answers: dict[int, StopStrings] = {}  # of the requests with stop strings that are being decoded
        self._thread = ThreadPoolExecutor(1, "decoding")  # has the engine, but for what moves to the device meanwhile
        self._staging = ThreadPoolExecutor(1, "staging")
        self._lock = threading.Lock()
        self._arrivals: dict[int, _Arrival] = {}
        self._dropped: set[int] = set()  # given up before they were loaded: their late pieces are thrown away

    def perform(self, action: Action) -> None:
        match action:
            case LoadKVCache():
                self._staging.submit(self._stage, action)
            case RunStep(batch):
                self._thread.submit(self._step, batch)
            case InlinePrefill():
                self._thread.submit(self._inline, action)
            case DropKVCache(dispatch):
                self._thread.submit(self._drop, dispatch)
            case _:
                raise TypeError(f"{self.node} cannot perform {type(action).__name__}")

    def close(self, deadline_s: float) -> None:
        for thread in (self._staging, self._thread):
            thread.shutdown(wait=False, cancel_futures=True)  # nobody waits for tokens any more

    # --- on the staging thread

    def _stage(self, load: LoadKVCache) -> None:
        with self._lock:
            arrival = self._arrivals.pop(load.dispatch, None)
        if arrival is None:  # dropped meanwhile
            return
        try:
            staged = self._engine.stage(arrival.kv.view(self._engine.dtype))
        except Exception as error:
            self._post(DecodingFailed(load.dispatch, self.node, f"{type(error).__name__}: {error}"))
        else:
            self._thread.submit(self._load, load, staged)

    # --- on the decoding thread

    def _load(self, load: LoadKVCache, staged: StagedKV) -> None:
        with self._lock:
            if load.dispatch in self._dropped:
                return
        try:
            stopped = self._join(load.dispatch, load.request, staged, load.first_token)
        except Exception as error:
            self._post(DecodingFailed(load.dispatch, self.node, f"{type(error).__name__}: {error}"))
        else:
            self._post(KVCacheLoaded(load.dispatch, stopped))

    def _join(self, dispatch: int, request: Request, kv: np.ndarray | StagedKV, first_token: int) -> bool:
        """Returns whether the first token already ends its text."""
        tokens = request.prompt_tokens + request.output_length
        self._engine.join(dispatch, kv, first_token, tokens, request.sampling)
        if request.stop:
            self._answers[dispatch] = StopStrings(request.stop, self._decode)
        return self._stops(dispatch, first_token)

    def _inline(self, inline: InlinePrefill) -> None:
        begun, request, layers = time.monotonic(), inline.request, []
        try:
            first = self._prefill.prefill(
                request.prompt_ids,
                on_layer=lambda layer, start, kv: layers.append(kv),  # once a layer: the prompt is one chunk
                sampling=request.sampling,
            )
            kv = np.stack([np.asarray(layer) for layer in layers])
            stopped = self._join(inline.dispatch, request, kv, first.token)
        except Exception as error:
            self._post(PrefillFailed(inline.dispatch, self.node, f"{type(error).__name__}: {error}"))
        else:
            seconds, logprobs = time.monotonic() - begun, first.logprobs.limited(request.sampling.logprobs)
            done = PrefillInlined(inline.dispatch, seconds, first.token, stopped, logprobs, first.top_logits)
            self._post(done)

    def _step(self, batch: tuple[int, ...]) -> None:
        begun = time.monotonic()
        try:
            tokens = self._engine.step(batch)
            for dispatch in [dispatch for dispatch, token in tokens.items() if token == NO_TOKEN]:
                del tokens[dispatch]
                self._post(DecodingFailed(dispatch, self.node, NOT_FINITE))
            stopped = tuple(dispatch for dispatch, token in tokens.items() if self._stops(dispatch, token))
            logprobs = tuple((i, known) for i in tokens if (known := self._engine.logprobs(i)) is not None)
        except Exception as error:
            self._post(StepFailed(f"{type(error).__name__}: {error}"))
        else:
            self._post(StepDone(tuple(tokens.items()), time.monotonic() - begun, stopped, logprobs))

    def _stops(self, dispatch: int, token: int) -> bool:
        """Whether the request's text holds one of its stop strings, now that this token has come."""
        answer = self._answers.get(dispatch)
        return answer is not None and answer.add(token)

    def _drop(self, dispatch: int) -> None:
        if dispatch in self._engine:
            self._engine.leave(dispatch)
            self._answers.pop(dispatch, None)
            return
        with self._lock:
            self._arrivals.pop(dispatch, None)
            self._dropped.add(dispatch)

    # --- on the messenger's thread

    def on_control(self, source: int, message: Any) -> bool:
        if not isinstance(message, KVCacheSent):
            return False
        with self._lock:
            arrival = self._arrivals.get(message.dispatch)
            if arrival is not None:
                arrival.sent = message
        self._announce(arrival)
        return True

    def place(self, source: int, header: Any) -> Sequence[np.ndarray] | None:
        with self._lock:
            if not isinstance(header, KVPiece) or header.dispatch in self._dropped:
                return None
            if header.dispatch not in self._arrivals:
                layout = self._layout
                shape = (layout.layers, 2, header.prompt_tokens, layout.kv_heads, layout.head_dim)
                self._arrivals[header.dispatch] = _Arrival(np.empty(shape, layout.raw))
            kv = self._arrivals[header.dispatch].kv[header.layer, :, header.start : header.start + header.tokens]
            return [kv[0], kv[1]]

    def on_buffers(self, source: int, header: KVPiece, buffers: Sequence[np.ndarray]) -> None:
        with self._lock:
            arrival = self._arrivals.get(header.dispatch)
            if arrival is not None:
                arrival.landed += header.tokens
        self._announce(arrival)

    def _announce(self, arrival: _Arrival | None) -> None:
        """Pieces and the last message travel apart: whichever comes last completes the KVCache."""
        if arrival is not None and arrival.complete:
            sent = arrival.sent
            self._post(KVCacheReceived(sent.dispatch, sent.request, sent.first_token, sent.logprobs))
