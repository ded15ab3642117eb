"""The prefill instance that profile measures: it stores and sends all that one in a cluster does. And rank 1's end."""

from concurrent.futures import Future

import numpy as np
import pytest

from mooncake_jax.cache.ending import PeerLost
from mooncake_jax.cache.layout import BlockLayout
from mooncake_jax.cache.transport import HostTransport
from mooncake_jax.cluster.control import KVCacheSent, KVPiece, Probe
from mooncake_jax.commands.profile_instance import ProfiledInstance
from mooncake_jax.commands.profile_links import ReceivingEnd
from mooncake_jax.parallel.prefill import PrefillEngine
from mooncake_jax.request import Request

BLOCK, LONGEST = 16, 80


class Links:
    """Gives everything to rank 1's end at once, in one process."""

    transport, lent = HostTransport(), None

    def __init__(self):
        self.end, self.failure, self.pieces, self.buffers = ReceivingEnd(), None, [], []

    def send(self, node, message):
        self.end.on_message(0, message)
        return self._ended()

    def send_buffers(self, node, header, buffers):
        placed = self.end.place(0, header)
        for place, buffer in zip(placed, buffers, strict=True):
            place[...] = buffer.view(place.dtype)
        self.pieces.append(header)
        self.buffers.append(placed)
        return self._ended()

    def _ended(self):
        future = Future()
        if self.failure is None:
            future.set_result(None)
        else:
            future.set_exception(self.failure)
        return future


@pytest.fixture
def links():
    return Links()


@pytest.fixture(scope="module")
def engine(tiny2):
    return PrefillEngine(tiny2, 32)


@pytest.fixture
def instance(tiny2, engine, links):
    config = tiny2.config
    layout = BlockLayout(config.num_layers, BLOCK, config.num_kv_heads, config.head_dim, "float32")
    return ProfiledInstance(engine, config, layout, LONGEST, links, deadline_s=30.0)


@pytest.mark.parametrize(("tokens", "prefix"), [(16, 0), (40, 0), (40, 32), (80, 16)])
def test_all_kvcache_of_a_prefill_is_sent_the_reused_prefix_too(tiny2, instance, links, tokens, prefix):
    assert instance.prefill_s(tokens, prefix) > 0
    for layer in range(tiny2.config.num_layers):
        sent = [
            place
            for piece in links.pieces
            if piece.layer == layer
            for place in range(piece.start, piece.start + piece.tokens)
        ]
        assert sorted(sent) == list(range(tokens))
    assert min(piece.start for piece in links.pieces if piece.start >= prefix) == prefix


def test_what_is_computed_is_stored_and_reused_bit_for_bit(instance, links):
    instance.prefill_s(64, 0)
    computed = {piece.layer: kv for piece, kv in zip(links.pieces, links.buffers, strict=True) if piece.start == 0}
    links.pieces.clear(), links.buffers.clear()
    instance.prefill_s(80, 32)
    reused = {piece.layer: kv for piece, kv in zip(links.pieces, links.buffers, strict=True) if piece.start == 0}
    assert reused.keys() == computed.keys()
    for layer, kv in reused.items():
        assert np.any(kv[0]) and all(np.array_equal(mine, first) for mine, first in zip(kv, computed[layer]))


def test_a_prefill_that_cannot_be_sent_fails_with_its_reason(instance, links):
    links.failure = PeerLost(1)
    with pytest.raises(RuntimeError, match="decode0 is lost"):
        instance.prefill_s(16, 0)


def test_rank_one_keeps_nothing_of_what_is_over_and_throws_probes_away():
    end, layout = ReceivingEnd(), BlockLayout(layers=2, tokens=4, kv_heads=1, head_dim=2, dtype="bfloat16")
    end.on_message(0, layout)
    keys, values = end.place(0, KVPiece(dispatch=7, layer=1, start=3, tokens=2, prompt_tokens=9))
    assert keys.shape == values.shape == (2, 1, 2) and keys.nbytes == 8
    other, _ = end.place(0, KVPiece(7, 0, 0, 9, 9))
    assert keys.base is not None and np.shares_memory(keys.base, other)
    end.on_message(0, KVCacheSent(7, Request("", 0.0, 9, 1), 0, None))
    again, _ = end.place(0, KVPiece(7, 0, 0, 9, 9))
    assert not np.shares_memory(again, other)
    assert end.place(0, Probe()) is None
