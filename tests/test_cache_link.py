"""The modelled link, in made-up time: never faster than its rate, nor slower for a late sender."""

import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_jax.cache.departures import Departures, Line
from mooncake_jax.cache.link import LATE_S, Link

GBPS = 0.8  # 10^8 bytes a second: pieces of 100 kB, a depth of 6 ms, 600 kB
BYTES_PER_S = 1e8
UNBOUNDED = 1 << 30  # pieces under way


class OnLink(Departures):
    """Parts that leave over a link, however many are under way."""

    def __init__(self, gbps=GBPS):
        super().__init__(UNBOUNDED)
        self.limit(Link(gbps))

    def put_parts(self, now, rank, nbytes, *names):
        self.put(now, Line(rank, deque((nbytes, name) for name in names)))


def drain(link, now, lateness=lambda: 0.0):
    """[(when, part), ...] of a sender who comes so much later than each is due."""
    left = []
    while (due := link.due()) is not None:
        now = max(now, due + lateness())
        while (part := link.pop(now)) is not None:
            left.append((now, part))
    return left


def test_the_sizes_follow_from_the_rate():
    assert Link(GBPS).piece == 800_000
    assert Link(10).piece == 10_000_000
    assert Link(0.001).piece == 65_536


def test_every_part_takes_its_time_and_nothing_is_due_before():
    link = OnLink()
    assert link.due() is None and link.pop(1.0) is None
    link.put_parts(5.0, 1, 100_000, *"abc")
    assert link.due() == pytest.approx(5.001)
    assert link.pop(5.0009) is None
    left = drain(link, 5.0)
    assert [part for _, part in left] == ["a", "b", "c"]
    assert [when for when, _ in left] == pytest.approx([5.001, 5.002, 5.003])


def test_an_idle_link_saves_nothing_up():
    link = OnLink()
    for start in (0.0, 100.0):
        link.put_parts(start, 1, 100_000, "part")
        assert link.pop(start) is None
        assert drain(link, start)[0][0] == pytest.approx(start + 0.001)


def test_a_link_whose_pieces_are_all_under_way_saves_nothing_up():
    link = Departures(at_once=1)
    link.limit(Link(GBPS))
    link.put(0.0, Line(1, deque([(100_000, "a"), (100_000, "b")])))
    assert link.pop(0.001) == "a"
    assert link.due() is None and link.pop(50.0) is None
    link.landed(100.0, 1)
    assert link.pop(100.0) is None
    assert drain(link, 100.0) == [(pytest.approx(100.001), "b")]


def test_a_late_sender_catches_up_on_the_depth_and_no_more():
    link = OnLink()
    link.put_parts(0.0, 1, 100_000, *range(20))
    at_once = 0
    while link.pop(1.0) is not None:
        at_once += 1
    assert at_once == 13  # PIECE_S and LATE_S, a part a millisecond
    assert link.due() == pytest.approx(1.001)


@pytest.mark.parametrize("gbps", [0.001, GBPS, 10, 400])
def test_lateness_within_the_depth_costs_no_rate(gbps):
    link, piece, rng = OnLink(gbps), Link(gbps).piece, random.Random(0)
    link.put_parts(0.0, 1, piece, *range(500))
    left = drain(link, 0.0, lambda: rng.uniform(0, LATE_S))
    ideal = 500 * piece / (gbps * 1e9 / 8)
    assert ideal <= left[-1][0] * (1 + 1e-9) and left[-1][0] <= ideal + LATE_S


def test_messages_take_their_time_too():
    link = OnLink()
    link.put_parts(0.0, 1, 100_000, "buffer")
    link.put_message(0.0005, 1, 1000, "message")
    link.put_message(0.0005, 2, 1000, "another")
    assert [link.pop(0.0005), link.pop(0.0005), link.pop(0.0005)] == ["message", "another", None]
    assert drain(link, 0.0005)[0] == (pytest.approx(0.00102), "buffer")  # its tokens went to the messages


def test_what_waits_for_a_lost_rank_is_forgotten_and_costs_nothing():
    link = OnLink()
    for rank in (1, 2):
        link.put_parts(0.0, rank, 100_000, f"buffer for {rank}")
        link.put_message(0.0, rank, 1000, f"message for {rank}")
    link.lose(1)
    assert drain(link, 0.0) == [
        (pytest.approx(0.00001), "message for 2"),
        (pytest.approx(0.00101), "buffer for 2"),
    ]
    link.lose(2)
    assert link.due() is None


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 1e-5, 1e-3, 0.02]), st.integers(1, 3), st.integers(0, 100_000), st.booleans()),
        max_size=60,
    ),
    st.integers(0, 2**32),
)
def test_no_time_sees_more_than_the_rate_and_the_depth(puts, seed):
    """Whatever is put whenever, and however late the sender looks."""
    link, rng, now, left = OnLink(), random.Random(seed), 0.0, []
    for number, (pause, rank, nbytes, urgent) in enumerate(puts):
        now += pause
        while (part := link.pop(now)) is not None:
            left.append((now, part))
        if urgent:
            link.put_message(now, rank, nbytes, number)
        else:
            link.put_parts(now, rank, nbytes, number)
    left += drain(link, now, lambda: rng.choice([0.0, 1e-4, 0.05]))
    assert sorted(part for _, part in left) == list(range(len(puts)))
    depth = Link(GBPS).piece + LATE_S * BYTES_PER_S
    for first, (begun, _) in enumerate(left):
        passed = 0
        for when, part in left[first:]:
            passed += puts[part][2]
            assert passed <= depth + (when - begun) * BYTES_PER_S + 1e-3
