"""Slots of DRAM: whoever has a slot's bytes can tell alone whether they are the block it wanted, whole and untorn."""

import numpy as np
import pytest
from store_blocks import DTYPES, LAYOUTS, block, random_block, random_blocks

from mooncake_jax.cache.pool import Block
from mooncake_jax.cache.slots import NotWhole, Slots
from mooncake_jax.cache.store import BlockStore


def check_slot(raw, layout, key):
    """The block in a slot's bytes, as whoever has read them finds it."""
    slots = Slots(raw.reshape(1, -1), layout)
    slots.check(0, key)
    return slots.blocks[0]


def slot_of(memory, store, slot):
    offset, nbytes = store.slot_range(slot)
    return memory[offset : offset + nbytes].copy()


@pytest.fixture(params=sorted(DTYPES))
def lent(request):
    """A store in memory that others may read, with room to spare, and that memory."""
    layout = LAYOUTS[request.param]
    memory = np.full(BlockStore.bytes_needed(4, layout) + 1000, 0xA5, np.uint8)
    memory = memory[-memory.ctypes.data % 64 :]
    return BlockStore(4, layout, memory), memory


def test_a_slot_tells_by_itself_whether_it_is_the_block_wanted(lent):
    store, memory = lent
    kv = random_block(store.layout)
    store.put(block(2), kv)
    raw = slot_of(memory, store, 2)
    assert check_slot(raw, store.layout, block(2).key).tobytes() == kv.tobytes()
    assert np.shares_memory(check_slot(raw, store.layout, block(2).key), raw)
    with pytest.raises(NotWhole, match="it holds another block"):
        check_slot(raw, store.layout, block(1).key)
    with pytest.raises(NotWhole, match="it is empty"):
        check_slot(slot_of(memory, store, 3), store.layout, block(3).key)


def test_any_flipped_bit_of_a_slot_is_noticed(lent):
    store, memory = lent
    store.put(block(2), random_block(store.layout))
    raw = slot_of(memory, store, 2)
    used = 16 + 32 + 9 * store.layout.layers  # of the header; the rest only aligns the block
    for place in (*range(used), *range(raw.size - store.layout.nbytes, raw.size)):
        torn = raw.copy()
        torn[place] ^= 4
        with pytest.raises(NotWhole):
            check_slot(torn, store.layout, block(2).key)


def test_a_slot_that_is_being_rewritten_is_no_block(lent):
    """Whatever mixture of two times a reader without the owner's help gets, it is not taken for either block."""
    store, memory = lent
    store.put(block(2), random_block(store.layout, 1))
    before, later = slot_of(memory, store, 2), Block(b"later".ljust(32), 2)
    store.claim([later])
    store.write([2], 0, random_blocks(store, 1, 5))
    during = slot_of(memory, store, 2)
    for key in (block(2).key, later.key):
        with pytest.raises(NotWhole):
            check_slot(during, store.layout, key)
        for cut in range(64, before.size, 64):
            for mixed in (np.r_[before[:cut], during[cut:]], np.r_[during[:cut], before[cut:]]):
                if key == later.key or not np.array_equal(mixed, before):
                    with pytest.raises(NotWhole):
                        check_slot(mixed, store.layout, key)


def test_what_the_memory_held_before_is_no_block(lent):
    store, memory = lent
    store.put(block(2), random_block(store.layout))
    again = BlockStore(4, store.layout, memory)
    assert again.sound([block(2)]) == 0
    with pytest.raises(NotWhole):
        check_slot(slot_of(memory, again, 2), store.layout, block(2).key)


def test_memory_that_does_not_do_is_refused():
    layout = LAYOUTS["float32"]
    needed = BlockStore.bytes_needed(2, layout)
    memory = np.zeros(needed + 64, np.uint8)
    memory = memory[-memory.ctypes.data % 64 :][:needed]
    BlockStore(2, layout, memory)
    constant = memory.view()
    constant.flags.writeable = False
    for wrong in (memory[:-1], memory[1:], memory.view(np.uint16), memory[::2], constant):
        with pytest.raises(ValueError, match="slab"):
            BlockStore(2, layout, wrong)
