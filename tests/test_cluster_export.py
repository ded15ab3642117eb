"""What an export sends and stores of a prefill's layers, and what of it comes into host memory."""

import random
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
from device_array import DeviceArray

from mooncake_jax.cache.layout import BlockLayout
from mooncake_jax.cache.pool import Block
from mooncake_jax.cache.store import BlockStore
from mooncake_jax.cache.transport import DeviceTransport, HostTransport
from mooncake_jax.cluster.export import Export
from mooncake_jax.request import Request
from mooncake_jax.sched.actions import RunPrefill

LAYOUT = BlockLayout(layers=2, tokens=4, kv_heads=1, head_dim=2, dtype="bfloat16")
DEADLINE_S = 30


class Links:
    """Keeps what is sent, and says that it has left unless it is told not to."""

    def __init__(self, transport, leaves=True):
        self.transport, self._leaves, self.sent, self.futures = transport, leaves, [], []

    def send_buffers(self, node, header, buffers):
        future = Future()
        if self._leaves:
            future.set_result(None)
        self.sent.append((header, list(buffers)))
        self.futures.append(future)
        return future


def kv_of(tokens, seed=0):
    return np.random.default_rng(seed).integers(0, 1 << 16, (2, 2, tokens, 1, 2), np.uint16)  # by layer


def export_of(tokens, missing, links, thread, reuse=0):
    store = BlockStore(tokens // LAYOUT.tokens + 1, LAYOUT)
    blocks = tuple(Block(bytes([slot]) * 32, slot) for slot in range(tokens // LAYOUT.tokens))
    store.claim([blocks[i] for i in missing])
    run = RunPrefill(1, Request("", 0.0, tokens, 1), "decode0", blocks, reuse, tuple(missing))
    return Export(run, reuse, frozenset(missing), store, 0, links, thread), store, blocks


@pytest.fixture
def thread():
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.mark.parametrize("seed", range(20))
def test_blocks_are_stored_whole_however_chunks_fall_and_only_those_that_were_missing(thread, seed):
    rng = random.Random(seed)
    reuse, tokens = rng.randrange(3), rng.randrange(12, 40)
    blocks_in_all = tokens // LAYOUT.tokens
    missing = [i for i in range(reuse, blocks_in_all) if rng.random() < 0.6]
    links = Links(HostTransport())
    export, store, blocks = export_of(tokens, missing, links, thread, reuse)
    kv, start = kv_of(tokens), reuse * LAYOUT.tokens
    while start < tokens:
        end = min(tokens, start + rng.randrange(1, 11))
        for layer in range(2):
            export.on_layer(layer, start, kv[layer, :, start:end])
        start = end
    export.finish(DEADLINE_S)
    for i in range(blocks_in_all):
        assert store.sound([blocks[i]]) == (i in missing)
        if i in missing:
            for layer in range(2):
                stored = store.read([i], layer)
                assert np.array_equal(stored, kv[layer, :, i * LAYOUT.tokens : (i + 1) * LAYOUT.tokens])
    for layer in range(2):
        sent = [(header.start, buffers) for header, buffers in links.sent if header.layer == layer]
        whole = [np.concatenate([buffers[half] for _, buffers in sorted(sent, key=lambda s: s[0])]) for half in (0, 1)]
        assert np.array_equal(np.stack(whole), kv[layer, :, reuse * LAYOUT.tokens :])


def test_only_chunks_with_tokens_that_are_stored_come_into_host_memory(thread):
    links = Links(DeviceTransport())
    export, store, blocks = export_of(24, [3], links, thread)  # tokens 12 to 15
    kv = kv_of(24)
    chunks = [(0, 6), (6, 13), (13, 18), (18, 24)]
    arrays = {start: DeviceArray(np.ascontiguousarray(kv[0, :, start:end])) for start, end in chunks}
    for start, array in arrays.items():
        export.on_layer(0, start, array)
    for start, end in chunks:
        export.on_layer(1, start, DeviceArray(np.ascontiguousarray(kv[1, :, start:end])))
    export.finish(DEADLINE_S)
    assert [array.fetched for array in arrays.values()] == [0, 1, 1, 0]
    assert [array.read_early for array in arrays.values()] == [[False]] * 4
    assert store.sound([blocks[3]]) == 1
    assert len(links.sent) == 8


def test_what_has_not_left_by_the_deadline_is_taken_back(thread):
    links = Links(HostTransport(), leaves=False)
    export, _, _ = export_of(8, [], links, thread)
    for layer in range(2):
        export.on_layer(layer, 0, kv_of(8)[layer])
    with pytest.raises(TimeoutError):
        export.finish(0.2)
    assert [future.cancelled() for future in links.futures] == [True, True]


def test_nothing_is_left_on_its_way_if_storing_fails(thread):
    links = Links(HostTransport(), leaves=False)
    export, store, _ = export_of(8, [0, 1], links, thread)
    store.write = None
    export.on_layer(0, 0, kv_of(8)[0])
    with pytest.raises(TypeError):
        export.finish(DEADLINE_S)
    assert [future.cancelled() for future in links.futures] == [True]
