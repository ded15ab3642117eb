"""KVCachePool: reservation, visibility, pins and eviction."""

import random

import pytest

from mooncake_jax.cache.eviction import POLICIES
from mooncake_jax.cache.pool import KVCachePool

A, B, C, D = (bytes([i]) * 32 for i in range(4))


def landed(pool, node, keys):
    blocks = pool.reserve(node, keys)
    pool.land(node, blocks)
    pool.release(node, blocks)
    return blocks


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


def test_room_for_a_prompt_is_not_made_of_its_own_blocks():
    pool = KVCachePool({"p0": 3})
    landed(pool, "p0", [A, B, C])
    damaged = pool.reserve("p0", [A])
    pool.lose("p0", damaged)
    pool.release("p0", damaged)
    held = pool.reserve("p0", [A, B, C, D])
    assert [block.key for block in held] == [A, B, C], "D finds no room, B and C stay"
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


@pytest.mark.parametrize("eviction", POLICIES)
def test_random_operations_keep_the_invariants(eviction):
    rng = random.Random(eviction)
    pool = KVCachePool({"p0": 12, "p1": 5}, eviction)
    chains = [[bytes([c, i]) * 16 for i in range(8)] for c in range(6)]
    held = []
    for _ in range(3000):
        node = rng.choice(["p0", "p1"])
        if held and rng.random() < 0.5:
            node, blocks = held.pop(rng.randrange(len(held)))
            if rng.random() < 0.7:
                pool.land(node, blocks)
            if rng.random() < 0.1:
                pool.lose(node, blocks[-2:])
            pool.release(node, blocks)
        else:
            keys = rng.choice(chains)[: rng.randrange(9)]
            blocks = pool.reserve(node, keys)
            assert [b.key for b in blocks] == keys[: len(blocks)]
            held.append((node, blocks))
        pool.check()
        assert pool.pins() == sum(len(blocks) for _, blocks in held)
    for node, blocks in held:
        pool.release(node, blocks)
    pool.check()
    assert pool.pins() == 0
