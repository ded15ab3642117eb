"""Test harness: the view that Conductor would have in a state written down in plain figures.

The costs are sums of powers of two, so that equal estimates are equal to the last bit, in whatever order they add up.
"""

from dataclasses import dataclass

from mooncake_jax.cache.pool import KVCachePool
from mooncake_jax.request import SLO, Request
from mooncake_jax.sched.decoding_load import DecodingLoad
from mooncake_jax.sched.prefill_queue import PrefillQueue
from mooncake_jax.sched.view import ClusterView

BLOCK = 16  # tokens
BYTES = 64  # a token
NOW = 8.0


@dataclass(frozen=True)
class ExactCost:
    """prefill: 1/64 s a computed token; step: 1/64 s, 1/64 s a request, 1/4096 s a token; transfer: `byte` s a byte."""

    byte: float = 2.0**-14

    def prefill(self, tokens, prefix):
        return (tokens - prefix) / 64

    def prefill_compute(self, tokens, prefix):
        return self.prefill(tokens, prefix)

    def step(self, batch, context):
        return (1 + batch) / 64 + context / 4096

    def transfer(self, nbytes, flows=1):
        return flows * nbytes * self.byte


def request(blocks=4, tail=0, name="asked", **fields):
    """A prompt of so many full blocks, and the tail's tokens."""
    keys = tuple(bytes([block]) * 32 for block in range(blocks))
    return Request(name, NOW, blocks * BLOCK + tail, 1, block_keys=keys, **fields)


def view_of(held, waiting=(), decoding=((),), slo=SLO(), cost=ExactCost(), kv_tokens=None, pace=()):
    """held: leading blocks of request() on each prefill instance; waiting: of each, the seconds of what waits there,
    which are dispatches 0, 1, ...; pace: of each; decoding: of each decoding instance, the prompt tokens of its
    requests, whose prefill has ended.
    """
    nodes = [f"prefill{place}" for place in range(len(held))]
    pool = KVCachePool(dict.fromkeys(nodes, 64))
    for node, blocks in zip(nodes, held):
        reserved = pool.reserve(node, request(blocks).block_keys)
        pool.land(node, reserved)
        pool.release(node, reserved)
    queues = {node: PrefillQueue() for node in nodes}
    for node, factor in zip(nodes, pace):
        queues[node].pace.factor = factor
    numbers = iter(range(10_000))
    for node, latencies in zip(nodes, waiting):
        for latency in latencies:
            queues[node].add(next(numbers), 1, latency)
    loads = {f"decode{place}": DecodingLoad() for place in range(len(decoding))}
    for load, tokens in zip(loads.values(), decoding):
        for prompt_tokens in tokens:
            number = next(numbers)
            load.add(number, prompt_tokens, NOW, slo.tbt)
            load.prefilled(number, NOW)
    return ClusterView(queues, loads, pool, cost, slo, BLOCK, BYTES, kv_tokens)
