"""The prefill instance that `mooncake-jax profile` measures: one stage with all that works beside its engine in a
cluster. New KVCache is stored and sent, layer by layer, and a prefill is done once all of it is.
"""

import itertools
import queue
import random

import numpy as np

from mooncake_jax.cache.layout import BlockLayout
from mooncake_jax.cache.pool import Block
from mooncake_jax.cache.store import BlockStore
from mooncake_jax.cluster.links import Links
from mooncake_jax.cluster.prefill_hardware import PrefillHardware
from mooncake_jax.cluster.prefill_stage import PrefillStage
from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.parallel.prefill import PrefillEngine
from mooncake_jax.request import Request
from mooncake_jax.sched.actions import RunPrefill
from mooncake_jax.sched.messages import Message, PrefillDone, PrefillFailed

_PREFILL, _DECODING = "prefill0", "decode0"


class ProfiledInstance:
    """layout: of the blocks it stores, which hold prompts of up to `longest` tokens, zeros at first. deadline_s: for
    what a prefill sends.
    """

    def __init__(
        self,
        engine: PrefillEngine,
        model: LlamaConfig,
        layout: BlockLayout,
        longest: int,
        links: Links,
        deadline_s: float,
    ):
        self._vocab_size, self._block_size = model.vocab_size, layout.tokens
        self._blocks = tuple(Block(slot.to_bytes(32), slot) for slot in range(longest // layout.tokens))
        store = BlockStore(max(len(self._blocks), 1), layout)
        zeros = np.zeros((layout.layers, 2, layout.tokens, layout.kv_heads, layout.head_dim), layout.raw)
        for block in self._blocks:
            store.put(block, zeros)
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._dispatches = itertools.count()
        links.send(_DECODING, layout)
        self._hardware = PrefillHardware(_PREFILL, (), layout.tokens, links, self._messages.put)
        stage = PrefillStage(
            _PREFILL, 0, 1, engine, store, None, links, deadline_s, self._hardware.on_report, self._messages.put
        )
        self._hardware.start(stage)

    def prefill_s(self, tokens: int, prefix: int) -> float:
        """Seconds of a prefill of `tokens`, of which `prefix` are reused, whole blocks: until all is stored and sent.
        Raises RuntimeError if it fails.
        """
        rng, dispatch = random.Random(0), next(self._dispatches)
        ids = tuple(rng.randrange(self._vocab_size) for _ in range(tokens))
        blocks, reuse = self._blocks[: tokens // self._block_size], prefix // self._block_size
        request = Request(str(dispatch), 0.0, tokens, 1, ids)
        missing = tuple(range(reuse, len(blocks)))
        self._hardware.perform(RunPrefill(dispatch, request, _DECODING, blocks, reuse, missing))
        while True:
            match self._messages.get():
                case PrefillDone(seconds=seconds):
                    return seconds
                case PrefillFailed(reason=reason):
                    raise RuntimeError(reason)
