"""KVCachePool: which node holds which KVCache block, and in which tier (report 3, figure 3).

Metadata only: it lives with Conductor, the bytes live on the nodes (cache/store.py, cache/ssd.py). A block is
*reserved* for a request when the request is dispatched and *landed* once all its bytes are in the node's DRAM; only
landed blocks are found by a match. Reserved and read blocks are pinned and never evicted; which of the others leaves
first says a policy (cache/eviction.py), for each tier of each node apart.

The SSD is written behind (write_behind.py): what has landed in DRAM is copied there in turn, pinned until it is. So a
block that leaves DRAM later is *demoted* at no cost to the request that takes its slot, and survives a restart; once
DRAM is full this writes no more than writing at eviction would. A block that only the SSD holds is found like any other
and *promoted* into DRAM for the request that uses it.

Whatever begins or ceases to be found in a tier is told as a Change. Knows nothing of time, ranks or models.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import compress

from mooncake_jax.cache.entry import Block
from mooncake_jax.cache.eviction import POLICIES
from mooncake_jax.cache.restoring import order_of_return
from mooncake_jax.cache.tier import Tier
from mooncake_jax.cache.write_behind import Backlog, WriteBehind


class Cause(StrEnum):
    """Why a block begins to be found in a tier: the first three; or ceases to."""

    LANDED = "landed"  # computed or copied into DRAM; written to the SSD
    PROMOTED = "promoted"  # into DRAM, from the SSD
    RESTORED = "restored"  # on the SSD from an earlier run
    EVICTED = "evicted"
    DEMOTED = "demoted"  # evicted from DRAM; the SSD still has it
    UNREADABLE = "unreadable"
    NODE_LOST = "node lost"


TIERS = DRAM, SSD = "dram", "ssd"
_BITS = bytes.maketrans(b"01", b"\0\1")  # what bin() writes, as truth values


@dataclass(frozen=True, slots=True)
class Change:
    """From now on a block is, or is no longer, found in this tier of this node."""

    node: str
    tier: str
    key: bytes
    cause: Cause

    @property
    def found(self) -> bool:
        return self.cause in (Cause.LANDED, Cause.PROMOTED, Cause.RESTORED)


@dataclass(slots=True)
class _Node:
    bit: int  # in the masks of holders
    dram: Tier
    ssd: Tier
    backlog: Backlog

    def has(self, key: bytes) -> bool:
        return self.dram.has_landed(key) or self.ssd.has_landed(key)


class KVCachePool:
    """Blocks of all nodes. dram and ssd: node name -> blocks that the tier holds; eviction: one of eviction.POLICIES;
    on_change: told of every change, in order.
    """

    def __init__(
        self,
        dram: Mapping[str, int],
        eviction: str = "lru",
        ssd: Mapping[str, int] | None = None,
        on_change: Callable[[Change], None] | None = None,
    ):
        policy, ssd = POLICIES[eviction], ssd or {}
        self._nodes: dict[str, _Node] = {}
        for place, (node, slots) in enumerate(dram.items()):
            tiers = Tier(slots, policy()), Tier(ssd.get(node, 0), policy())
            self._nodes[node] = _Node(1 << place, *tiers, Backlog(*tiers))
        self._names = tuple(dram)  # by place of their bit
        self._everyone = (1 << len(dram)) - 1
        self._none = dict.fromkeys(dram, 0)
        self._holders: dict[bytes, int] = {}  # of each block that is found: the bits of its nodes
        self._on_change = on_change
        self.counts: Counter[tuple[str, Cause]] = Counter()  # changes until now, by tier and cause
        self.unwritten = 0  # blocks that SSDs could not store

    # --- finding

    def match(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Number of leading blocks found on each node, in either tier. Changes nothing.

        Costs a lookup a block, for all nodes at once, and a little for each node that holds any; matched() is for one.
        """
        lengths, alive = self._none.copy(), self._everyone
        for length, key in enumerate(keys):
            holders = self._holders.get(key, 0)
            if left := alive & ~holders:
                if length:
                    lengths.update(dict.fromkeys(self._nodes_of(left), length))
                alive &= holders
                if not alive:
                    return lengths
        lengths.update(dict.fromkeys(self._nodes_of(alive), len(keys)))
        return lengths

    def matched(self, node: str, keys: Iterable[bytes]) -> int:
        """Number of leading blocks found on one node, as match() says. Changes nothing."""
        holders, bit, count = self._holders, self._nodes[node].bit, 0
        for key in keys:
            if not holders.get(key, 0) & bit:
                break
            count += 1
        return count

    def holders(self, key: bytes) -> tuple[str, ...]:
        """The nodes that hold a replica of this block."""
        return tuple(self._nodes_of(self._holders.get(key, 0)))

    def in_dram(self, node: str, keys: Iterable[bytes]) -> int:
        """How many leading blocks are found in the node's DRAM."""
        return self._nodes[node].dram.landed(keys)

    def _nodes_of(self, mask: int) -> Iterator[str]:
        """Those whose bit is set. Without a loop of Python's: there may be a thousand."""
        return compress(self._names, bin(mask)[:1:-1].encode().translate(_BITS))

    # --- in DRAM

    def reserve(self, node: str, keys: Sequence[bytes]) -> tuple[Block, ...]:
        """Pin the blocks of a prompt in a node's DRAM, those there and those to be written.

        Returns as many leading blocks as fit: a block without its parent would never be found. Undo with release().
        Raises ValueError, with nothing changed, if a key comes twice, which chained ones never do.
        """
        entries, evicted = self._nodes[node].dram.reserve(keys)
        if evicted:
            self._left_dram(node, evicted)
        return tuple([entry.block or entry.told() for entry in entries])

    def awaits_writer(self, node: str, block: Block) -> bool:
        """Whether nobody has yet promised to write this reserved block: it has not landed, and the only pin is the
        asker's.
        """
        entry = self._nodes[node].dram.entries[block.key]
        return not entry.landed and entry.pins == 1

    def land(self, node: str, landed: Iterable[Block], cause: Cause = Cause.LANDED) -> None:
        """All bytes of these blocks are in the node's DRAM: if they still have their slots, they are found."""
        if node not in self._nodes:
            return
        dram, new = self._nodes[node].dram, []
        for key, slot in landed:
            entry = dram.entries.get(key)
            if entry is not None and entry.slot == slot and not entry.landed:
                new.append(entry)
        dram.land(new)
        keys = [entry.key for entry in new]
        self._found(node, DRAM, keys, keys, cause)

    def lose(self, node: str, lost: Iterable[Block]) -> None:
        """These blocks turned out unreadable in DRAM: they are not found there until they land again."""
        if node not in self._nodes:
            return
        dram = self._nodes[node].dram
        for key, slot in lost:
            entry = dram.entries.get(key)
            if entry is not None and entry.slot == slot and entry.landed:
                dram.lose(entry)
                self._changed(node, DRAM, key, Cause.UNREADABLE)

    def release(self, node: str, reserved: Iterable[Block]) -> None:
        """Unpin what reserve() pinned. A block that never landed and that nobody else waits for gives its slot back."""
        if node not in self._nodes:  # lost meanwhile, and its blocks with it
            return
        self._nodes[node].dram.unpin([block.key for block in reserved])

    # --- on the SSD

    def promote(self, node: str, reserved: Sequence[Block]) -> tuple[Block, ...]:
        """Which of a prompt's reserved blocks are to be read from the SSD into their slots: those that a match finds
        only there and nobody else reads yet. They cannot leave the SSD until promoted().
        """
        tiers, chosen = self._nodes[node], []
        here, there = tiers.dram.entries, tiers.ssd.entries.get
        for block in reserved:
            entry = here[block.key]
            if entry.landed:
                continue
            copy = there(block.key)
            if copy is None or not copy.landed:
                break
            if entry.pins == 1:  # as awaits_writer() says
                copy.pins += 1
                chosen.append(block)
        return tuple(chosen)

    def promoted(self, node: str, asked: Iterable[Block], loaded: Iterable[Block]) -> WriteBehind:
        """Of what promote() chose, these blocks have been read and verified. The others are not found any more."""
        if node not in self._nodes:
            return WriteBehind()
        ssd, loaded = self._nodes[node].ssd, set(loaded)
        dropped = tuple(block.key for block in asked if block not in loaded)
        for key in dropped:
            ssd.lose(ssd.entries[key])
            self._changed(node, SSD, key, Cause.UNREADABLE)
        ssd.unpin([block.key for block in asked])
        self.land(node, (block for block in asked if block in loaded), Cause.PROMOTED)
        return WriteBehind(dropped=dropped)

    def write_behind(self, node: str, reserved: Sequence[Block]) -> WriteBehind:
        """A prompt's blocks have landed: what the node is to do now so that its SSD comes to hold them as well. Blocks
        that are being written stay pinned until written(), which says what to do next.
        """
        if node not in self._nodes or not self._nodes[node].ssd.capacity:
            return WriteBehind()
        self._nodes[node].backlog.add([block.key for block in reserved])
        return self._write_next(node)

    def written(self, node: str, asked: Iterable[Block], stored: Iterable[bytes]) -> WriteBehind:
        """Of what a WriteBehind said, these keys are on the SSD in whole."""
        if node not in self._nodes:
            return WriteBehind()
        tiers, stored, keys = self._nodes[node], set(stored), [block.key for block in asked]
        written = [key for key in keys if key in stored]
        here = tiers.dram.entries
        lost = [key for key in written if not here[key].landed]  # the others were pinned there, and are found
        tiers.backlog.written(keys, stored)
        self._found(node, SSD, written, lost, Cause.LANDED)
        following = self._write_next(node)
        if len(written) == len(keys):
            return following
        failed = [key for key in keys if key not in stored]  # parts of them may be there
        self.unwritten += len(failed)
        return dataclasses.replace(following, dropped=(*failed, *following.dropped))

    def _write_next(self, node: str) -> WriteBehind:
        write = self._nodes[node].backlog.next()
        for key in write.dropped:
            self._changed(node, SSD, key, Cause.EVICTED)
        return write

    def restore(self, node: str, stored: Sequence[tuple[bytes, bytes | None]]) -> None:
        """Blocks that an earlier run has left on the node's SSD, (key, parent's key), the least recent first; no more
        than it holds.
        """
        ssd = self._nodes[node].ssd
        for key, depth in order_of_return(stored):
            ssd.restore(key, depth)
            self._changed(node, SSD, key, Cause.RESTORED)

    # --- all of it

    def drop_node(self, node: str) -> None:
        """The node is gone: nothing on it is found any more."""
        tiers = self._nodes.pop(node, None)
        if tiers is None:
            return
        self._everyone &= ~tiers.bit
        del self._none[node]
        for name, tier in ((DRAM, tiers.dram), (SSD, tiers.ssd)):
            for key, entry in tier.entries.items():
                if entry.landed:
                    self._forget_holder(key, tiers.bit)
                    self._tell(node, name, key, Cause.NODE_LOST)

    def _found(self, node: str, tier: str, keys: Sequence[bytes], anew: Sequence[bytes], cause: Cause) -> None:
        """They have just begun to be found in this tier; those among them that the other tier has not are `anew`."""
        if not keys:
            return
        holders, bit = self._holders, self._nodes[node].bit
        for key in anew:
            holders[key] = holders.get(key, 0) | bit
        self.counts[tier, cause] += len(keys)
        if self._on_change is not None:
            for key in keys:
                self._on_change(Change(node, tier, key, cause))

    def _left_dram(self, node: str, keys: Sequence[bytes]) -> None:
        """They have just been evicted from it."""
        tiers = self._nodes[node]
        there, demoted = tiers.ssd.entries.get, 0
        for key in keys:
            copy = there(key)
            kept = copy is not None and copy.landed
            demoted += kept
            if not kept:
                self._forget_holder(key, tiers.bit)
            if self._on_change is not None:
                self._on_change(Change(node, DRAM, key, Cause.DEMOTED if kept else Cause.EVICTED))
        if demoted:
            self.counts[DRAM, Cause.DEMOTED] += demoted
        if len(keys) > demoted:
            self.counts[DRAM, Cause.EVICTED] += len(keys) - demoted

    def _changed(self, node: str, tier: str, key: bytes, cause: Cause) -> None:
        tiers = self._nodes[node]
        if tiers.has(key):
            self._holders[key] = self._holders.get(key, 0) | tiers.bit
        else:
            self._forget_holder(key, tiers.bit)
        self._tell(node, tier, key, cause)

    def _forget_holder(self, key: bytes, bit: int) -> None:
        left = self._holders.get(key, 0) & ~bit
        if left:
            self._holders[key] = left
        else:
            self._holders.pop(key, None)

    def _tell(self, node: str, tier: str, key: bytes, cause: Cause) -> None:
        self.counts[tier, cause] += 1
        if self._on_change is not None:
            self._on_change(Change(node, tier, key, cause))

    def blocks(self) -> dict[str, tuple[int, int]]:
        """How many blocks are found on each node: in its DRAM, on its SSD."""
        return {
            node: tuple(len(tier.entries) - tier.awaited for tier in (tiers.dram, tiers.ssd))
            for node, tiers in self._nodes.items()
        }

    def pins(self) -> int:
        """Pins held over all nodes; 0 when no request is under way and nothing is being written to an SSD."""
        both = [tier for tiers in self._nodes.values() for tier in (tiers.dram, tiers.ssd)]
        return sum(entry.pins for tier in both for entry in tier.entries.values())

    def check(self) -> None:
        """Assert the invariants."""
        holders: dict[bytes, int] = {}
        for node, tiers in self._nodes.items():
            for tier in (tiers.dram, tiers.ssd):
                tier.check()
                for key in filter(tier.has_landed, tier.entries):
                    holders[key] = holders.get(key, 0) | tiers.bit
            tiers.backlog.check()
        assert holders == self._holders, "the holders of some block are wrong"
