"""How long the engine and the links take, measured on them: what a cost model is fitted to (report 6.1).

Each instance takes a few short measurements of itself as it starts; `mooncake-jax profile` takes many, of steps and
links by the same functions. At the start prefills are the bare engine's, without export (for which other instances
would have to be ready), and of repeated runs the shortest counts, for other ranks measure themselves meanwhile:
Conductor learns by which factor that is too little (sched/pace.py).
"""

import random
import statistics
import time
from collections.abc import Callable

import numpy as np

from mooncake_jax.cache.layout import BlockLayout
from mooncake_jax.cluster.control import Probe
from mooncake_jax.cluster.links import Links
from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.parallel.decoding import DecodingEngine
from mooncake_jax.parallel.prefill import PrefillEngine

REPEATS = 2
PROBE_BYTES = (1 << 16, 1 << 20, 1 << 23)
PROBE_DEADLINE_S = 60.0


def measure_prefill(engine: PrefillEngine, model: LlamaConfig, chunk: int, together: Callable[[], None]):
    """((tokens, prefix, seconds), ...) for a short and a long prompt, and a long one of which half is reused.

    together: waits until all stages of the instance are here.
    """
    longest = min(2 * chunk, model.max_context - 1, 1024)
    shapes = {(min(16, longest), 0), (max(longest // 4, 1), 0), (longest, 0), (longest, longest // 2)}
    return tuple(
        (tokens, prefix, prefill_s(engine, model, tokens, prefix, REPEATS, together))
        for tokens, prefix in sorted(shapes)
    )


def measure_steps(engine: DecodingEngine, layout: BlockLayout, max_batch: int, max_context: int):
    """((batch, total context, seconds), ...) for small and large batches with short and long contexts, as far as the
    empty engine has room for them: it must have for a few tokens.
    """
    shapes = set()
    for batch, context in [(1, 32), (1, 512), (max_batch, 32), (max_batch, 128)]:
        room = min(max_context, engine.free_pages // batch * layout.tokens) - REPEATS - 1  # of each, if all fit
        context = max(1, min(context, room))
        shapes.add((min(batch, engine.free_pages // engine.pages_for(context + REPEATS + 1)), context))
    return tuple(
        (batch, batch * context, step_s(engine, layout, batch, context, REPEATS)) for batch, context in sorted(shapes)
    )


def measure_transfer(links: Links, node: str):
    """((bytes, seconds), ...) of sends to `node`, whose messenger throws them away."""
    return tuple((nbytes, transfer_s(links, node, nbytes, 1, REPEATS)) for nbytes in PROBE_BYTES)


def prefill_s(
    engine: PrefillEngine,
    model: LlamaConfig,
    tokens: int,
    prefix: int,
    repeats: int,
    together: Callable[[], None] = lambda: None,
) -> float:
    """Seconds of a prefill of `tokens` of which `prefix` are reused, taking those from host memory."""
    rng = random.Random(0)
    ids = [rng.randrange(model.vocab_size) for _ in range(tokens)]
    kv = np.zeros((2, prefix, model.num_kv_heads, model.head_dim), engine.dtype)
    seconds = []
    for _ in range(repeats):
        together()
        seconds.append(timed(lambda: engine.prefill(ids, prefix_len=prefix, load_layer=lambda _: kv)))
    return min(seconds)


def step_s(engine: DecodingEngine, layout: BlockLayout, batch: int, context: int, repeats: int) -> float:
    """Seconds of a step of `batch` requests with `context` tokens each, for which the empty engine has room: the median
    of two repeats or more, without the first, which waits for the requests' KVCache.
    """
    total = context + repeats + 1
    kv = np.zeros((layout.layers, 2, context, layout.kv_heads, layout.head_dim), engine.dtype)
    requests = [-1 - i for i in range(batch)]
    for request in requests:
        engine.join(request, kv, 0, total)
    seconds = [timed(lambda: engine.step(requests)) for _ in range(repeats)]
    for request in requests:
        engine.leave(request)
    return statistics.median(seconds[1:])


def load_s(engine: DecodingEngine, layout: BlockLayout, context: int, repeats: int) -> float:
    """Seconds that loading `context` tokens of KVCache from host memory takes before a request joins, all of it on one
    thread; not above 0 where that is lost in the noise.
    """
    kv = np.zeros((layout.layers, 2, context, layout.kv_heads, layout.head_dim), engine.dtype)

    def join_and_step() -> None:
        engine.join(-1, kv, 0, context + 2)
        engine.step([-1])

    joining, alone = [], []
    for _ in range(repeats):
        joining.append(timed(join_and_step))
        alone.append(timed(lambda: engine.step([-1])))
        engine.leave(-1)
    return min(joining) - min(alone)


def transfer_s(links: Links, node: str, nbytes: int, flows: int, repeats: int) -> float:
    """Seconds until all of `flows` sends of so many bytes to `node`, begun at once, have left."""
    buffers = [np.zeros(nbytes, np.uint8) for _ in range(flows)]

    def send() -> None:
        for sent in [links.send_buffers(node, Probe(), [buffer]) for buffer in buffers]:
            sent.result(PROBE_DEADLINE_S)

    return min(timed(send) for _ in range(repeats))


def busy_cores(work: Callable[[], object], repeats: int, cpu_s: Callable[[], float]) -> float:
    """How many of the machine's cores are kept busy meanwhile; the most, since others may take some. cpu_s: CPU seconds
    used so far, of all processes that work.
    """
    return max(_cores_of(work, cpu_s) for _ in range(repeats))


def _cores_of(work: Callable[[], object], cpu_s: Callable[[], float]) -> float:
    before = cpu_s()
    seconds = timed(work)
    return (cpu_s() - before) / seconds


def timed(work: Callable[[], object]) -> float:
    """Seconds that it takes."""
    begun = time.monotonic()
    work()
    return max(time.monotonic() - begun, 1e-9)
