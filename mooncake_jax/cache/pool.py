"""KVCachePool: which node holds which KVCache block, in which slot of its store (report 3, figure 3).

Metadata only: it lives with Conductor, the bytes live on the nodes (cache/store.py). A block is *reserved* for a
request when the request is dispatched and *landed* once all its bytes are in the store; only landed blocks are found
by a match. Reserved and read blocks are pinned and never evicted; which of the others leaves first says a policy
(cache/eviction.py). Knows nothing of time, ranks or models.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mooncake_jax.cache.eviction import POLICIES, EvictionPolicy


@dataclass(frozen=True, slots=True)
class Block:
    """One KVCache block on one node: its key and the slot of that node's store it lies, or will lie, in."""

    key: bytes
    slot: int


@dataclass(slots=True)
class _Entry:
    slot: int
    landed: bool = False
    pins: int = 0


@dataclass(slots=True)
class _NodeBlocks:
    """The blocks of one node."""

    entries: dict[bytes, _Entry]
    policy: EvictionPolicy  # knows the same keys, and which are pinned
    free: list[int]
    capacity: int

    def take_slot(self) -> int | None:
        """A free slot, evicting an unpinned block if need be; None when every block is pinned."""
        if self.free:
            return self.free.pop()
        key = self.policy.evict()
        return None if key is None else self.entries.pop(key).slot

    def give_slots(self, keys: Sequence[bytes]) -> int:
        """To those that have none, from the first on while there is room; how many leading ones have one then."""
        for place, key in enumerate(keys):
            if key not in self.entries:
                slot = self.take_slot()
                if slot is None:
                    return place
                self.entries[key] = _Entry(slot)
        return len(keys)

    def pin(self, key: bytes) -> None:
        entry = self.entries[key]
        entry.pins += 1
        if entry.pins == 1:
            self.policy.pin(key)

    def unpin(self, key: bytes) -> None:
        """A block that never landed and that nobody else waits for gives its slot back."""
        entry = self.entries[key]
        entry.pins -= 1
        if entry.pins == 0:
            self.policy.unpin(key)
            if not entry.landed:
                self.discard(key)

    def discard(self, key: bytes) -> None:
        self.policy.remove(key)
        self.free.append(self.entries.pop(key).slot)


class KVCachePool:
    """Blocks of all nodes. capacities: node name -> slots of its store; eviction: one of eviction.POLICIES."""

    def __init__(self, capacities: dict[str, int], eviction: str = "lru"):
        self._nodes = {
            node: _NodeBlocks({}, POLICIES[eviction](), list(range(slots - 1, -1, -1)), slots)
            for node, slots in capacities.items()
        }

    def match(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Number of leading blocks landed on each node. Changes nothing."""
        return {node: self._match_one(blocks, keys) for node, blocks in self._nodes.items()}

    @staticmethod
    def _match_one(blocks: _NodeBlocks, keys: Sequence[bytes]) -> int:
        for length, key in enumerate(keys):
            entry = blocks.entries.get(key)
            if entry is None or not entry.landed:
                return length
        return len(keys)

    def reserve(self, node: str, keys: Sequence[bytes]) -> tuple[Block, ...]:
        """Pin the blocks of a prompt on a node, those there and those to be written, and tell the policy of their use.

        Returns as many leading blocks as fit: a block without its parent would never be found. Undo with release().
        """
        blocks = self._nodes[node]
        there = dict.fromkeys(key for key in keys if key in blocks.entries)
        for key in there:  # before room is made, which must not cost the prompt blocks of its own
            blocks.pin(key)
        fitting = blocks.give_slots(keys)
        for depth in range(fitting - 1, -1, -1):  # the head of a chain comes last, so that it outlives its tail
            if keys[depth] in there:
                blocks.policy.use(keys[depth])
            else:
                blocks.policy.insert(keys[depth], depth)
                blocks.pin(keys[depth])
        for key in keys[fitting:]:
            if key in there:
                blocks.unpin(key)
        return tuple(Block(key, blocks.entries[key].slot) for key in keys[:fitting])

    def awaits_writer(self, node: str, block: Block) -> bool:
        """Whether nobody has yet promised to write this reserved block: it has not landed, and the only pin is the
        asker's.
        """
        entry = self._nodes[node].entries[block.key]
        return not entry.landed and entry.pins == 1

    def land(self, node: str, landed: Iterable[Block]) -> None:
        """All bytes of these blocks are in the node's store: if they still have their slots, they are found."""
        if node not in self._nodes:
            return
        for block in landed:
            entry = self._nodes[node].entries.get(block.key)
            if entry is not None and entry.slot == block.slot:
                entry.landed = True

    def lose(self, node: str, lost: Iterable[Block]) -> None:
        """These blocks turned out unreadable: they are not found until they land again."""
        if node not in self._nodes:
            return
        for block in lost:
            entry = self._nodes[node].entries.get(block.key)
            if entry is None or entry.slot != block.slot:
                continue
            entry.landed = False
            if entry.pins == 0:
                self._nodes[node].discard(block.key)

    def release(self, node: str, reserved: Iterable[Block]) -> None:
        """Unpin what reserve() pinned. A block that never landed and that nobody else waits for gives its slot back."""
        if node not in self._nodes:  # lost meanwhile, and its blocks with it
            return
        for block in reserved:
            self._nodes[node].unpin(block.key)

    def drop_node(self, node: str) -> None:
        """The node is gone: nothing on it is found any more."""
        self._nodes.pop(node, None)

    def pins(self) -> int:
        """Pins held over all nodes; 0 when no request is under way."""
        total = 0
        for blocks in self._nodes.values():
            for entry in blocks.entries.values():
                total += entry.pins
        return total

    def check(self) -> None:
        """Assert the invariants: each slot is used once or free, no pin is negative, nothing unpinned is half-
        written.
        """
        for node, blocks in self._nodes.items():
            slots = [entry.slot for entry in blocks.entries.values()] + blocks.free
            assert sorted(slots) == list(range(blocks.capacity)), f"{node}: slots leaked or used twice"
            blocks.policy.check()
            for key, entry in blocks.entries.items():
                assert entry.pins >= 0, f"{node}: block {key.hex()[:12]} has {entry.pins} pins"
                assert entry.landed or entry.pins > 0, f"{node}: block {key.hex()[:12]} is unpinned and not landed"
