"""What leaves a rank next: messages first, then ranks and transfers in turns, and not too much at once."""

import random
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from mooncake_jax.cache.departures import Departures, Line


def line(rank, parts):
    return Line(rank, deque((1000, part) for part in parts))


def drain(departures):
    """All that leaves while nothing lands."""
    left = []
    while (part := departures.pop(0.0)) is not None:
        left.append(part)
    return left


def test_messages_go_first_and_keep_their_order():
    departures = Departures(10)
    departures.put(0.0, line(1, ["piece"]))
    departures.put_message(0.0, 1, 10, "first")
    departures.put_message(0.0, 2, 10, "second")
    assert drain(departures) == ["first", "second", "piece"]
    assert departures.due() is None


def test_ranks_take_turns():
    departures = Departures(10)
    for rank, parts in ((1, "abc"), (2, "de"), (3, "f")):
        departures.put(0.0, line(rank, parts))
    assert "".join(drain(departures)) == "adfbec"


def test_transfers_to_one_rank_take_turns_and_a_small_one_does_not_wait_for_a_large_one():
    departures = Departures(100)
    departures.put(0.0, line(1, "a" * 50))
    assert [departures.pop(0.0) for _ in range(3)] == ["a", "a", "a"]
    departures.put(0.0, line(1, "bb"))
    assert "".join(drain(departures)).startswith("ababaaa")


def test_no_more_than_so_many_pieces_are_under_way_to_a_rank():
    departures = Departures(2)
    departures.put(0.0, line(1, "abc"))
    departures.put(0.0, line(2, "x"))
    assert drain(departures) == ["a", "x", "b"]
    assert departures.due() is None
    departures.put_message(0.0, 1, 10, "message")
    assert drain(departures) == ["message"]
    departures.landed(0.0, 1)
    assert departures.due() == 0.0
    assert drain(departures) == ["c"]


def test_a_transfer_that_is_dropped_leaves_its_turn_to_the_others():
    departures = Departures(10)
    dropped, kept = line(1, "abcd"), line(1, "xy")
    departures.put(0.0, dropped)
    departures.put(0.0, kept)
    assert departures.pop(0.0) == "a"
    assert departures.drop(dropped) == 3
    assert departures.drop(dropped) == 0
    assert drain(departures) == ["x", "y"]
    assert departures.drop(kept) == 0


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6)), max_size=20), st.integers(1, 4), st.integers(0, 2**32))
def test_everything_leaves_once_in_order_whatever_lands_when(transfers, at_once, seed):
    departures, rng, left, under_way, lines = Departures(at_once), random.Random(seed), [], [], []
    for number, (rank, parts) in enumerate(transfers):
        lines.append(line(rank, [(number, rank, place) for place in range(parts)]))
        departures.put(0.0, lines[-1])
    dropped = rng.choice(lines) if lines and rng.random() < 0.5 else None
    if dropped is not None:
        departures.drop(dropped)
    while True:
        while (part := departures.pop(0.0)) is not None:
            left.append(part)
            under_way.append(part[1])
            assert under_way.count(part[1]) <= at_once
        if not under_way:
            break
        departures.landed(0.0, under_way.pop(rng.randrange(len(under_way))))
    for number, (rank, parts) in enumerate(transfers):
        mine = [place for other, _, place in left if other == number]
        assert mine == ([] if lines[number] is dropped else list(range(parts)))
