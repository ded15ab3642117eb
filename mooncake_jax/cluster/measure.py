"""Short measurements that each instance takes of itself as it starts, from which Conductor's cost model is fitted
(report 6.1).
"""

import random
import time
from collections.abc import Callable

import numpy as np

from mooncake_jax.cache.store import BlockLayout
from mooncake_jax.cluster.control import Probe
from mooncake_jax.cluster.links import Links
from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.parallel.decoding import DecodingEngine
from mooncake_jax.parallel.prefill import PrefillEngine

REPEATS = 2  # the shortest counts: the machine is shared while all ranks start
PROBE_BYTES = (1 << 16, 1 << 20, 1 << 23)
PROBE_DEADLINE_S = 60.0


def measure_prefill(engine: PrefillEngine, model: LlamaConfig, chunk: int, together: Callable[[], None]):
    """((tokens, prefix, seconds), ...) for a short and a long prompt, and a long one of which half is reused.

    together: waits until all stages of the instance are here.
    """
    longest = min(2 * chunk, model.max_context - 1, 1024)
    shapes = {(min(16, longest), 0), (max(longest // 4, 1), 0), (longest, 0), (longest, longest // 2)}
    rng = random.Random(0)
    ids = [rng.randrange(model.vocab_size) for _ in range(longest)]
    points = []
    for tokens, prefix in sorted(shapes):
        kv = np.zeros((2, prefix, model.num_kv_heads, model.head_dim), engine.dtype)
        seconds = []
        for _ in range(REPEATS):
            together()
            seconds.append(timed(lambda: engine.prefill(ids[:tokens], prefix_len=prefix, load_layer=lambda _: kv)))
        points.append((tokens, prefix, min(seconds)))
    return tuple(points)


def measure_steps(engine: DecodingEngine, layout: BlockLayout, max_batch: int, max_context: int):
    """((batch, total context, seconds), ...) for small and large batches with short and long contexts."""
    shapes = [(1, 32), (1, 512), (max_batch, 32), (max_batch, 128)]
    points = []
    for batch, context in shapes:
        context = min(context, max_context - REPEATS - 2)
        total = context + REPEATS + 1
        joined = min(batch, engine.free_pages // engine.pages_for(total))
        kv = np.zeros((layout.layers, 2, context, layout.kv_heads, layout.head_dim), engine.dtype)
        for i in range(joined):
            engine.join(-1 - i, kv, 0, total)
        batch_ids = [-1 - i for i in range(joined)]
        if joined:
            points.append(
                (joined, joined * context, min(timed(lambda: engine.step(batch_ids)) for _ in range(REPEATS)))
            )
        for i in batch_ids:
            engine.leave(i)
    return tuple(points)


def measure_transfer(links: Links, node: str):
    """((bytes, seconds), ...) of sends to `node`, whose messenger throws them away."""
    points = []
    for nbytes in PROBE_BYTES:
        buffer = np.zeros(nbytes, np.uint8)
        send = lambda buffer=buffer: links.send_buffers(node, Probe(), [buffer]).result(PROBE_DEADLINE_S)  # noqa: E731
        points.append((nbytes, min(timed(send) for _ in range(REPEATS))))
    return tuple(points)


def timed(work: Callable[[], object]) -> float:
    """Seconds that it takes."""
    begun = time.monotonic()
    work()
    return max(time.monotonic() - begun, 1e-9)
