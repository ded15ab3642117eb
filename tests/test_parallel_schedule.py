"""The pipeline's schedule: every chunk at every stage once and in order, and what a perfect pipeline takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_jax.parallel.schedule import bubbles, makespan, plan_chunks, ticks


def test_three_chunks_on_two_stages():
    assert list(ticks("abc", 2)) == [("a", None), ("b", "a"), ("c", "b"), (None, "c")]
    assert bubbles(ticks("abc", 2)) == (2, 8)


def test_one_stage_has_no_bubbles_and_nothing_takes_no_tick():
    assert list(ticks("abc", 1)) == [("a",), ("b",), ("c",)]
    assert bubbles(ticks("abc", 1)) == (0, 3)
    assert list(ticks("", 3)) == []


def test_a_request_follows_another_without_draining_the_pipeline():
    first, second = [(0, i) for i in range(3)], [(1, i) for i in range(2)]
    together = bubbles(ticks([*first, *second], 4))
    assert together == (12, 32)  # three ticks to fill and to drain, not twice
    assert bubbles(ticks(first, 4))[0] + bubbles(ticks(second, 4))[0] == 24


@given(
    entering=st.lists(st.one_of(st.none(), st.integers(0, 99)), max_size=12),
    stages=st.integers(1, 6),
)
def test_each_chunk_passes_every_stage_in_successive_ticks(entering, stages):
    plan = list(ticks(entering, stages))
    for tick, chunk in enumerate(entering):
        if chunk is not None:
            assert [plan[tick + stage][stage] for stage in range(stages)] == [chunk] * stages
    work = sum(chunk is not None for chunk in entering) * stages
    assert bubbles(plan) == (len(plan) * stages - work, len(plan) * stages)


def test_the_next_chunk_is_asked_for_as_late_as_can_be():
    asked = []

    def entering():
        for chunk in "ab":
            asked.append(chunk)
            yield chunk

    plan = ticks(entering(), 2)
    next(plan)
    assert asked == ["a"]


@given(tokens=st.integers(1, 500), data=st.data(), chunk=st.integers(1, 70))
def test_chunks_cover_what_is_not_reused(tokens, data, chunk):
    prefix = data.draw(st.integers(0, tokens - 1))
    chunks = plan_chunks(tokens, prefix, chunk)
    assert [start for start, _ in chunks] == [prefix + i * chunk for i in range(len(chunks))]
    assert sum(length for _, length in chunks) == tokens - prefix
    assert all(1 <= length <= chunk for _, length in chunks)


def test_makespan_by_hand():
    assert makespan([]) == 0
    assert makespan([[1.0], [2.0]]) == 3
    assert makespan([[1, 1], [1, 1], [1, 1]]) == 4
    # The second chunk's last stage waits for its first, the third's first for nothing.
    assert makespan([[1, 1], [5, 1], [1, 1]]) == 8
    assert makespan([[1, 5], [1, 1]]) == 7


@given(st.lists(st.floats(0.01, 9), min_size=1, max_size=8), st.integers(1, 4))
def test_makespan_lies_between_the_work_of_a_stage_and_all_work(costs, stages):
    even = [[cost / stages] * stages for cost in costs]
    assert sum(costs) / stages <= makespan(even) + 1e-9
    assert makespan(even) <= sum(costs) + 1e-9
    assert makespan(even) == pytest.approx(sum(costs) / stages + max(costs) * (stages - 1) / stages)
