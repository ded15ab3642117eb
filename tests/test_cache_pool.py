"""KVCachePool: reservation, visibility, pins and eviction."""

import random

import pytest
from pool_blocks import landed

from mooncake_jax.cache.eviction import POLICIES
from mooncake_jax.cache.pool import DRAM, SSD, TIERS, Cause, KVCachePool, WriteBehind

A, B, C, D, E, F, G = (bytes([i]) * 32 for i in range(7))


def test_a_block_is_found_only_after_it_landed():
    pool = KVCachePool({"p0": 4, "p1": 4})
    blocks = pool.reserve("p0", [A, B])
    assert pool.match([A, B]) == {"p0": 0, "p1": 0}
    pool.land("p0", blocks[:1])
    assert pool.match([A, B]) == {"p0": 1, "p1": 0}
    pool.land("p0", blocks)
    assert pool.match([A, B, C]) == {"p0": 2, "p1": 0}


def test_match_stops_at_the_first_gap():
    pool = KVCachePool({"p0": 4})
    landed(pool, "p0", [A, B, C])
    pool.lose("p0", pool.reserve("p0", [A, B])[1:])
    assert pool.match([A, B, C]) == {"p0": 1}


def test_equal_keys_share_a_slot():
    pool = KVCachePool({"p0": 4})
    first = pool.reserve("p0", [A, B])
    second = pool.reserve("p0", [A, C])
    assert first[0] == second[0]
    assert len({first[1].slot, second[0].slot, second[1].slot}) == 3


def test_least_recently_used_leaves_first_and_heads_outlive_tails():
    pool = KVCachePool({"p0": 3})
    landed(pool, "p0", [A, B])
    landed(pool, "p0", [C])
    landed(pool, "p0", [A, B])
    landed(pool, "p0", [D])  # evicts C, the least recently used
    assert (pool.match([A, B])["p0"], pool.match([C])["p0"], pool.match([D])["p0"]) == (2, 0, 1)
    landed(pool, "p0", [C])  # evicts B: the tail goes before the head
    assert (pool.match([A, B])["p0"], pool.match([D])["p0"]) == (1, 1)


def test_the_policy_decides_what_leaves_first():
    found = {}
    for eviction in POLICIES:
        pool = KVCachePool({"p0": 3}, eviction)
        landed(pool, "p0", [A])
        landed(pool, "p0", [A])  # used twice
        landed(pool, "p0", [B])
        landed(pool, "p0", [C])
        landed(pool, "p0", [D])
        found[eviction] = [key for key in (A, B, C, D) if pool.match([key])["p0"]]
    used_twice_stays, oldest_leaves = [A, C, D], [B, C, D]
    assert found == {
        "lru": oldest_leaves,
        "lfu": used_twice_stays,
        "length": used_twice_stays,
        "fifo": oldest_leaves,
        "sieve": used_twice_stays,
    }


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("eviction", POLICIES)
def test_of_one_prompt_the_tail_leaves_before_the_head(eviction, uses):
    pool = KVCachePool({"p0": 3}, eviction)
    for _ in range(uses):
        landed(pool, "p0", [A, B, C])
    for key, left in ((D, 2), (E, 1)):
        pool.reserve("p0", [key])
        assert pool.match([A, B, C]) == {"p0": left}


def test_no_more_is_evicted_than_there_is_no_room_for():
    pool = KVCachePool({"p0": 4})
    landed(pool, "p0", [A, B, C])
    landed(pool, "p0", [D, E])
    assert pool.match([A, B, C]) == {"p0": 2} and pool.counts[DRAM, Cause.EVICTED] == 1


def test_room_for_a_prompt_is_not_made_of_its_own_blocks():
    pool = KVCachePool({"p0": 3})
    landed(pool, "p0", [A, B, C])
    damaged = pool.reserve("p0", [A])
    pool.lose("p0", damaged)
    pool.release("p0", damaged)
    held = pool.reserve("p0", [A, B, C, D])
    assert [block.key for block in held] == [A, B, C], "D finds no room, B and C stay"
    pool.check()


@pytest.mark.parametrize("keys", [[A, B, A], [C, C], [A, D, D]])
@pytest.mark.parametrize("slots", [2, 8])
def test_keys_that_are_no_chain_are_refused_and_nothing_changes(slots, keys):
    pool = KVCachePool({"p0": slots})
    landed(pool, "p0", [A, B])
    with pytest.raises(ValueError, match=f"block {keys[-1].hex()[:12]} comes twice in a prompt"):
        pool.reserve("p0", keys)
    assert (pool.match([A, B]), pool.pins(), pool.blocks()) == ({"p0": 2}, 0, {"p0": (2, 0)})
    pool.check()


def test_pinned_blocks_are_never_evicted():
    pool = KVCachePool({"p0": 2})
    held = pool.reserve("p0", [A, B])
    assert pool.reserve("p0", [C]) == ()
    pool.land("p0", held)
    assert pool.reserve("p0", [C]) == (), "landed but still in use"
    pool.release("p0", held)
    assert len(pool.reserve("p0", [C])) == 1


def test_a_reservation_that_never_landed_gives_its_slot_back():
    pool = KVCachePool({"p0": 2})
    pool.release("p0", pool.reserve("p0", [A, B]))
    pool.check()
    assert pool.pins() == 0
    assert pool.match([A]) == {"p0": 0}
    assert len(pool.reserve("p0", [C, D])) == 2


def test_a_lost_block_that_nobody_uses_gives_its_slot_back():
    pool = KVCachePool({"p0": 2})
    pool.lose("p0", landed(pool, "p0", [A, B])[1:])
    pool.check()
    assert pool.match([A, B]) == {"p0": 1}


def test_what_lands_after_its_reservation_is_gone_is_not_found():
    pool = KVCachePool({"p0": 2})
    late = pool.reserve("p0", [A])
    pool.release("p0", late)
    pool.land("p0", late)
    assert pool.match([A]) == {"p0": 0}
    pool.check()


def test_a_lost_node_is_forgotten_with_its_pins():
    pool = KVCachePool({"p0": 2, "p1": 2})
    held = pool.reserve("p0", [A])
    pool.drop_node("p0")
    pool.land("p0", held)
    pool.release("p0", held)
    assert pool.match([A]) == {"p1": 0}
    assert pool.pins() == 0


def test_holders_of_a_block_are_the_nodes_where_it_is_found():
    pool = KVCachePool({"p0": 2, "p1": 2, "p2": 2})
    landed(pool, "p2", [A, B])
    landed(pool, "p0", [A])
    pool.reserve("p1", [A])
    assert (pool.holders(A), pool.holders(B), pool.holders(C)) == (("p0", "p2"), ("p2",), ())
    assert pool.replicas() == {A: 2, B: 1}
    pool.drop_node("p2")
    assert (pool.holders(A), pool.holders(B)) == (("p0",), ())
    assert pool.match([A, B]) == {"p0": 1, "p1": 0}


def test_a_match_over_many_nodes_is_that_of_each_alone():
    rng = random.Random(1)
    nodes = [f"p{i}" for i in range(130)]
    keys = [bytes([i]) * 32 for i in range(40)]
    pool, lengths = KVCachePool(dict.fromkeys(nodes, 40)), {}
    for node in nodes:
        lengths[node] = rng.randrange(41)
        landed(pool, node, keys[: lengths[node]])
    assert pool.match(keys) == lengths == {node: pool.matched(node, keys) for node in nodes}
    pool.drop_node("p7")
    del lengths["p7"]
    assert pool.match(keys[:5]) == {node: min(length, 5) for node, length in lengths.items()}
    assert pool.match([]) == dict.fromkeys(lengths, 0)


# --- the SSD tier


def write_behind(pool, node, blocks):
    """Whatever can be; returns what was dropped."""
    write, dropped = pool.write_behind(node, blocks), []
    while write.blocks or write.dropped:
        dropped += write.dropped
        write = pool.written(node, write.blocks, [block.key for block in write.blocks])
    return dropped


def stored(pool, node, keys):
    """Lands in DRAM and is written to the SSD."""
    write_behind(pool, node, landed(pool, node, keys))


def test_what_landed_is_written_behind_with_its_parents_and_pinned_until_it_is():
    pool = KVCachePool({"p0": 4}, ssd={"p0": 10})
    blocks = landed(pool, "p0", [A, B])
    write = pool.write_behind("p0", blocks)
    assert write == WriteBehind(blocks, (None, A), ())
    assert len(pool.reserve("p0", [C, D, E])) == 2, "A and B cannot leave DRAM while they are being read"
    pool.check()
    assert pool.written("p0", write.blocks, [A, B]) == WriteBehind()
    assert pool.write_behind("p0", blocks) == WriteBehind(), "they are there already"


def test_what_could_not_be_written_is_forgotten_on_disk_and_offered_again():
    pool = KVCachePool({"p0": 4}, ssd={"p0": 10})
    blocks = landed(pool, "p0", [A, B])
    pool.write_behind("p0", blocks)
    assert pool.written("p0", blocks, [A]) == WriteBehind(dropped=(B,))
    assert pool.blocks() == {"p0": (2, 1)} and pool.unwritten == 1
    assert pool.write_behind("p0", blocks) == WriteBehind(blocks[1:], (A,), ())


def test_a_block_that_leaves_dram_is_found_on_the_ssd_and_promoted_by_its_next_use():
    pool = KVCachePool({"p0": 2}, ssd={"p0": 10})
    stored(pool, "p0", [A])
    stored(pool, "p0", [B, C])
    assert pool.counts[DRAM, Cause.DEMOTED] == 1
    assert pool.match([A]) == {"p0": 1}
    again = pool.reserve("p0", [A])
    assert pool.promote("p0", again) == again
    assert not pool.promote("p0", pool.reserve("p0", [A])), "somebody reads it already"
    pool.release("p0", again)
    assert pool.in_dram("p0", [A]) == 0
    assert pool.promoted("p0", again, again) == WriteBehind()
    assert pool.in_dram("p0", [A]) == 1
    pool.release("p0", again)
    assert pool.pins() == 0
    pool.check()


def test_what_cannot_be_read_from_the_ssd_is_found_no_more():
    pool = KVCachePool({"p0": 4}, ssd={"p0": 10})
    pool.restore("p0", [(A, None), (B, A)])
    assert pool.match([A, B]) == {"p0": 2}
    blocks = pool.reserve("p0", [A, B])
    assert pool.promote("p0", blocks) == blocks
    assert pool.promoted("p0", blocks, blocks[:1]) == WriteBehind(dropped=(B,))
    assert pool.match([A, B]) == {"p0": 1}
    pool.release("p0", blocks)
    pool.check()
    assert pool.blocks() == {"p0": (1, 1)}


def test_only_the_found_prefix_is_promoted():
    pool = KVCachePool({"p0": 4}, ssd={"p0": 10})
    pool.restore("p0", [(A, None), (C, B)])
    blocks = pool.reserve("p0", [A, B, C])
    assert pool.promote("p0", blocks) == blocks[:1], "C is of no use without B"


def test_a_block_that_is_being_promoted_cannot_leave_the_ssd():
    pool = KVCachePool({"p0": 4}, ssd={"p0": 1})
    pool.restore("p0", [(A, None)])
    blocks = pool.reserve("p0", [A])
    pool.promote("p0", blocks)
    assert pool.write_behind("p0", landed(pool, "p0", [B])) == WriteBehind()
    pool.promoted("p0", blocks, blocks)
    assert write_behind(pool, "p0", landed(pool, "p0", [B])) == [A]
    assert pool.counts[SSD, Cause.EVICTED] == 1
    assert pool.match([A]) == {"p0": 1}, "in DRAM"


def test_writing_behind_holds_up_at_most_half_of_dram_and_goes_on_with_the_rest():
    pool = KVCachePool({"p0": 4}, ssd={"p0": 10})
    blocks = landed(pool, "p0", [A, B, C])
    write = pool.write_behind("p0", blocks)
    assert write.blocks == blocks[:2]
    assert pool.write_behind("p0", landed(pool, "p0", [D])) == WriteBehind()
    assert pool.written("p0", write.blocks[:2], [A, B]) == WriteBehind(blocks[2:], (B,), ())
    [d] = pool.written("p0", blocks[2:], [C]).blocks
    assert d.key == D
    pool.check()


def test_a_disk_that_fails_is_not_tried_again_before_the_next_use():
    pool = KVCachePool({"p0": 4}, ssd={"p0": 10})
    blocks = landed(pool, "p0", [A, B, C])
    write = pool.write_behind("p0", blocks)
    pool.write_behind("p0", landed(pool, "p0", [D]))
    assert [block.key for block in pool.written("p0", write.blocks, ()).blocks] == [D]
    assert pool.write_behind("p0", blocks).blocks == blocks[:1], "half of DRAM, and D is on its way"


def test_depths_on_the_ssd_are_places_in_the_prompt():
    """Where not all of it finds room, too."""
    pool = KVCachePool({"p0": 12}, "length", ssd={"p0": 3})
    stored(pool, "p0", [A, B])
    assert write_behind(pool, "p0", landed(pool, "p0", [C, D])) == [B], "the deepest"
    pool = KVCachePool({"p0": 12}, "length", ssd={"p0": 2})
    stored(pool, "p0", [A, B, C])
    assert pool.blocks() == {"p0": (3, 2)}
    assert write_behind(pool, "p0", landed(pool, "p0", [D])) == [B]


def test_what_left_dram_before_it_was_written_is_passed_over():
    pool = KVCachePool({"p0": 2}, ssd={"p0": 10})
    first = pool.write_behind("p0", landed(pool, "p0", [A, B]))
    assert [block.key for block in first.blocks] == [A]
    landed(pool, "p0", [C])  # takes the place of B
    assert pool.written("p0", first.blocks, [A]) == WriteBehind()
    assert pool.blocks() == {"p0": (2, 1)}


def test_restored_heads_outlive_their_tails_and_chains_go_by_their_last_use():
    pool = KVCachePool({"p0": 9}, ssd={"p0": 4})
    pool.restore("p0", [(A, None), (C, None), (D, C), (B, A)])  # A was written first, and its tail last
    gone = []
    for key in (E, F, G):
        gone += write_behind(pool, "p0", landed(pool, "p0", [key]))
    assert gone == [D, C, B]


def test_a_lost_node_loses_both_tiers_whatever_is_under_way():
    pool = KVCachePool({"p0": 4, "p1": 4}, ssd={"p0": 10})
    pool.restore("p0", [(A, None)])
    promoting = pool.reserve("p0", [A])
    pool.promote("p0", promoting)
    writing = landed(pool, "p0", [B])
    pool.write_behind("p0", writing)
    pool.drop_node("p0")
    pool.drop_node("p0")
    assert pool.promoted("p0", promoting, promoting) == WriteBehind()
    assert pool.written("p0", writing, [B]) == WriteBehind()
    assert pool.write_behind("p0", writing) == WriteBehind()
    assert pool.holders(A) == pool.holders(B) == ()
    assert (pool.counts[SSD, Cause.NODE_LOST], pool.counts[DRAM, Cause.NODE_LOST]) == (1, 1)
    pool.check()


class Mirror:
    """What is found where, known from changes alone."""

    def __init__(self):
        self.found = set()

    def hear(self, change):
        place = (change.node, change.tier, change.key)
        assert change.found != (place in self.found), f"{change} says nothing new"
        (self.found.add if change.found else self.found.remove)(place)


def random_step(rng, pool, chains, held):
    """One operation of a request that begins, moves on or ends."""
    node = rng.choice(["p0", "p1"])
    if not held or rng.random() < 0.4:
        keys = rng.choice(chains)[: rng.randrange(9)]
        blocks = pool.reserve(node, keys)
        assert [b.key for b in blocks] == keys[: len(blocks)]
        held.append((node, blocks, pool.promote(node, blocks), "reserved"))
        return
    node, blocks, asked, state = held.pop(rng.randrange(len(held)))
    some = [block for block in asked if rng.random() < 0.8]
    if state == "reserved":
        pool.promoted(node, asked, some)
        if rng.random() < 0.7:
            pool.land(node, blocks)
        if rng.random() < 0.1:
            pool.lose(node, blocks[-2:])
        write = pool.write_behind(node, blocks)
        pool.release(node, blocks)
    else:
        write = pool.written(node, asked, [block.key for block in some])
    if write.blocks:
        held.append((node, (), write.blocks, "writing"))


@pytest.mark.parametrize("eviction", POLICIES)
def test_random_operations_keep_the_invariants_and_tell_every_change(eviction):
    rng, mirror = random.Random(eviction), Mirror()
    pool = KVCachePool({"p0": 12, "p1": 5}, eviction, {"p0": 20, "p1": 3}, mirror.hear)
    chains = [[bytes([c, i]) * 16 for i in range(8)] for c in range(6)]
    held = []
    for _ in range(100_000 if eviction == "lru" else 20_000):
        random_step(rng, pool, chains, held)
        pool.check()
        found = {
            (n, t, k)
            for n, tiers in pool._nodes.items()
            for t in TIERS
            for k in getattr(tiers, t).entries
            if getattr(tiers, t).has_landed(k)
        }
        assert mirror.found == found
    pool.drop_node("p1")  # whatever is under way there
    pool.check()
    assert not any(node == "p1" for node, *_ in mirror.found)
    while held:
        node, blocks, asked, state = held.pop()
        if state == "reserved":
            pool.promoted(node, asked, ())
        elif following := pool.written(node, asked, ()).blocks:
            held.append((node, (), following, "writing"))
        pool.release(node, blocks)
    pool.check()
    assert pool.pins() == 0
