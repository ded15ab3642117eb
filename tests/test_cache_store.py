"""BlockStore: bytes come back as they went in, and damage is noticed."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from ssd_blocks import open_files, resident_bytes
from store_blocks import DTYPES, LAYOUTS, block, random_block, random_blocks

from mooncake_jax.cache.layout import BlockLayout
from mooncake_jax.cache.pool import Block
from mooncake_jax.cache.slots import NotWhole
from mooncake_jax.cache.ssd import Result, SSDStore, Status
from mooncake_jax.cache.store import BlockStore


@pytest.fixture(params=sorted(DTYPES))
def store(request):
    return BlockStore(8, LAYOUTS[request.param])


def fill(store, slots):
    store.claim(map(block, slots))
    layers = [random_blocks(store, len(slots), seed) for seed in range(store.layout.layers)]
    for layer, blocks in enumerate(layers):
        store.write(slots, layer, blocks)
    return layers


def in_token_order(blocks):
    count, two, tokens, *rest = blocks.shape
    return blocks.swapaxes(0, 1).reshape(two, count * tokens, *rest)


def flip(store, slot, layer):
    store.block(slot)[layer].view(np.uint8).reshape(-1)[10] ^= 1


# Layers of several blocks.


def test_layers_of_successive_blocks_read_back_in_token_order(store):
    slots = [5, 0, 7]
    layers = fill(store, slots)
    for layer, blocks in enumerate(layers):
        got = store.read(slots, layer).view(blocks.dtype)
        assert np.array_equal(got, in_token_order(blocks))


def test_reads_are_copies(store):
    [first, *_] = fill(store, [2])
    got = store.read([2], 0).view(first.dtype)
    store.write([2], 0, random_blocks(store, 1, seed=9))
    assert np.array_equal(got, in_token_order(first))


def test_reads_land_where_they_are_told(store):
    layers, slots = fill(store, [5, 0]), [5, 0]
    _, _, tokens, kv_heads, head_dim = store.layout.shape
    room = np.zeros((2, 2 * tokens + 3, kv_heads, head_dim), layers[0].dtype)
    assert store.read(slots, 1, out=room[:, 3:]) is not None
    assert np.array_equal(room[:, 3:], in_token_order(layers[1])) and not room[:, :3].any()


@pytest.mark.parametrize("heads", [slice(0, 1), slice(1, 2), slice(None), slice(1, 1)])
def test_some_heads_can_be_read_alone(store, heads):
    slots = [3, 6, 1]
    layers = fill(store, slots)
    got = store.read(slots, 2, heads)
    assert np.array_equal(got.view(layers[2].dtype), in_token_order(layers[2])[:, :, heads])


@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize("writers", [1, 2])
def test_blocks_of_one_tensor_parallelism_serve_another(store, writers, readers):
    """Each writer has the heads that it computed; all of a block is put together and stored, and each reader takes its
    own: bit by bit what one rank has of what the other had.
    """
    heads = store.layout.kv_heads
    whole = random_block(store.layout, 5)
    parts = [whole[..., part * heads // writers : (part + 1) * heads // writers, :] for part in range(writers)]
    store.put(block(4), np.concatenate(parts, axis=-2))
    for part in range(readers):
        mine = slice(part * heads // readers, (part + 1) * heads // readers)
        out = np.empty(whole[..., mine, :].shape, whole.dtype)
        store.get(block(4), out, heads=mine)
        assert out.tobytes() == whole[..., mine, :].tobytes()
        layer = np.stack([store.read([4], layer, mine) for layer in range(store.layout.layers)])
        assert layer.tobytes() == whole[..., mine, :].tobytes()


def test_a_damaged_or_missing_layer_cannot_be_read(store):
    fill(store, [4, 5])
    flip(store, 4, 1)
    with pytest.raises(NotWhole, match="layer 1 does not match its checksum"):
        store.read([5, 4], 1)
    store.read([5, 4], 0)
    store.claim([block(5)])
    with pytest.raises(NotWhole, match="layer 0 is not written"):
        store.read([5], 0)


# Whole blocks.


def test_a_block_comes_back_as_it_was_put(store):
    kv = random_block(store.layout, 3)
    store.put(block(2), kv)
    out = np.zeros_like(kv)
    store.get(block(2), out)
    assert out.tobytes() == kv.tobytes()
    some = np.zeros_like(kv[1:])
    store.get(block(2), some, layers=slice(1, None))
    assert some.tobytes() == kv[1:].tobytes()
    assert store.sound([block(2)]) == 1


def test_puts_and_layer_by_layer_writes_make_the_same_slot(store):
    kv = random_block(store.layout, 3)
    store.put(block(2), kv)
    put = store.block(2).tobytes(), store.sums(2).tobytes()
    store.claim([block(2)])
    for layer in (2, 0, 1):
        store.write([2], layer, kv[layer][None])
    assert put == (store.block(2).tobytes(), store.sums(2).tobytes())
    out = np.zeros_like(kv)
    store.get(block(2), out)
    assert out.tobytes() == kv.tobytes()


def test_strided_blocks_can_be_put_and_read_into(store):
    wide = np.zeros((*store.layout.shape, 2), DTYPES[store.layout.dtype])
    wide[..., 1] = random_block(store.layout)
    store.put(block(0), wide[..., 1])
    store.get(block(0), wide[..., 0])
    assert np.array_equal(wide[..., 0], wide[..., 1])


def test_what_is_not_there_whole_cannot_be_got(store):
    kv = random_block(store.layout)
    out = np.zeros_like(kv)
    with pytest.raises(NotWhole, match="it is empty"):
        store.get(block(1), out)
    store.put(block(1), kv)
    with pytest.raises(NotWhole, match="it holds another block"):
        store.get(Block(bytes(32), 1), out)
    flip(store, 1, 2)
    with pytest.raises(NotWhole, match="layer 2 does not match"):
        store.get(block(1), out)
    store.get(block(1), out[:2], layers=slice(0, 2))
    with pytest.raises(NotWhole, match="layer 2 does not match"):
        store.get(block(1), out[2:, :, :, :1], layers=slice(2, 3), heads=slice(0, 1))


def test_a_slot_that_is_given_away_while_it_is_read_is_noticed(store, monkeypatch):
    """A slow reader must not return the bytes of a block that came later."""
    store.put(block(1), random_block(store.layout, 1))
    later, checked = Block(b"later".ljust(32), 1), threading.Event()
    check_layer, out = store._slots.check_layer, np.zeros_like(random_block(store.layout)[:1])

    def then_evicted(slot, layer):
        check_layer(slot, layer)
        if not checked.is_set():
            checked.set()
            store.put(later, random_block(store.layout, 2))

    for read in (lambda: store.get(block(1), out, layers=slice(0, 1)), lambda: store.read([1], 0)):
        store.put(block(1), random_block(store.layout, 1))
        checked.clear()
        monkeypatch.setattr(store._slots, "check_layer", then_evicted)
        with pytest.raises(NotWhole, match="it was written while it was read"):
            read()
        monkeypatch.undo()


def test_many_threads_read_while_others_write_other_slots(store):
    layers = fill(store, [0, 1, 2])
    expected = [in_token_order(blocks).tobytes() for blocks in layers]

    def read(number):
        return store.read([0, 1, 2], number % 3).tobytes() == expected[number % 3]

    def write(number):
        kv, slot = random_block(store.layout, number), 3 + number % 5
        with locks[slot]:
            store.put(block(slot), kv)
            out = np.zeros_like(kv)
            store.get(block(slot), out)
        return out.tobytes() == kv.tobytes()

    locks = [threading.Lock() for _ in range(8)]
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(lambda number: (read if number % 2 else write)(number), range(400)))


# What is sound.


def test_sound_needs_every_layer(store):
    store.claim([block(1)])
    store.write([1], 0, random_blocks(store, 1))
    assert store.sound([block(1)]) == 0
    fill(store, [1])
    assert store.sound([block(1)]) == 1


def test_sound_needs_the_right_block(store):
    fill(store, [1])
    assert store.sound([Block(b"other" + bytes(27), 1)]) == 0


def test_a_flipped_bit_ends_the_sound_prefix(store):
    fill(store, [4, 3, 6])
    blocks = [block(4), block(3), block(6)]
    assert store.sound(blocks) == 3
    flip(store, 3, 2)
    assert store.sound(blocks) == 1
    assert store.sound([block(3)]) == 0


def test_claimed_slots_are_not_sound_until_rewritten(store):
    fill(store, [4])
    store.claim([block(4)])
    assert store.sound([block(4)]) == 0
    fill(store, [4])
    assert store.sound([block(4)]) == 1


def test_blocks_are_adopted_with_their_checksums(store):
    kv = random_block(store.layout)
    store.put(block(0), kv)
    store.claim([block(5)])
    store.block(5)[:] = kv.view(store.layout.raw)
    assert store.sound([block(5)]) == 0
    store.adopt(block(5), store.sums(0))
    assert store.sound([block(5)]) == 1
    flip(store, 5, 0)
    assert store.sound([block(5)]) == 0
    store.adopt(block(5), store.sums(0))
    assert store.sound([block(5)]) == 0  # whatever it is said to be
    with pytest.raises(NotWhole, match="it holds another block"):
        store.adopt(Block(b"another".ljust(32), 5), store.sums(0))


def test_a_block_goes_to_ssd_and_comes_back_with_its_checksums(store, tmp_path):
    kv = random_block(store.layout, 7)
    store.put(block(3), kv)
    ssd = SSDStore(tmp_path, store.layout, b"a model", 1 << 24)
    try:
        key = block(3).key
        assert ssd.put(key, store.block(3), sums=store.sums(3)).result() == Result(Status.DONE)
        store.claim([Block(key, 6)])
        assert ssd.read(key, range(store.layout.layers), store.block(6)).result() == Result(Status.DONE)
        store.adopt(Block(key, 6), ssd.sums(key))
        out = np.zeros_like(kv)
        store.get(Block(key, 6), out)
        assert out.tobytes() == kv.tobytes()
        flip(store, 3, 1)  # after it was stored: it must not reach the SSD
        assert ssd.put(key, store.block(3), sums=store.sums(3)).result().status == Status.DAMAGED
    finally:
        ssd.close()


def test_layout_sizes():
    layout = BlockLayout(layers=80, tokens=512, kv_heads=8, head_dim=128, dtype="bfloat16")
    assert layout.bytes_per_token == 320 * 1024  # LLaMA2-70B, report 3
    assert layout.nbytes == 512 * 320 * 1024


# Long use.


def test_memory_is_flat_over_many_blocks(store):
    kv, out = random_block(store.layout), random_block(store.layout)

    def cycle(numbers):
        for number in numbers:
            here = Block(number.to_bytes(32, "little"), number % 8)
            store.put(here, kv)
            store.get(here, out)
            store.claim([here])
            store.write([here.slot], 0, kv[:1])
            store.read([here.slot], 0)

    cycle(range(1000))
    files, resident = open_files(), resident_bytes()
    cycle(range(1000, 21_000))
    assert open_files() <= files
    assert resident_bytes() - resident < 4 << 20
