"""Entry: what is known of one block in one tier of one node.

One object a block, so that whoever has found it needs no further look-up: a tier of a long run has hundreds of
thousands of blocks, and each look-up in so large a dictionary misses the processor's caches.
"""

from collections.abc import Hashable
from functools import partial
from typing import NamedTuple


class Block(NamedTuple):
    """One KVCache block on one node: its key and the slot of that node's DRAM it lies, or will lie, in."""

    key: bytes
    slot: int


_block = partial(tuple.__new__, Block)  # as Block._make, in half its time


class Entry:
    """block: what others are told of it, once told() was asked; landed: whether all its bytes are there; pins: how many
    want it to stay: with any it is not evicted; used: for an eviction policy, which says what it means.
    """

    __slots__ = ("block", "key", "landed", "pins", "slot", "used")

    def __init__(self, key: Hashable, slot: int = 0, landed: bool = True, pins: int = 0):
        self.key, self.slot, self.landed, self.pins, self.used = key, slot, landed, pins, 0
        self.block: Block | None = None  # many are never asked for: those of SSDs

    def told(self) -> Block:
        self.block = _block((self.key, self.slot))
        return self.block
