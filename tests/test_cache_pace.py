"""How long the messenger rests between two looks at MPI."""

import time

import pytest

from mooncake_jax.cache.pace import LONGEST_S, SHORTEST_S, SOON_S, Pace


@pytest.fixture
def clock(monkeypatch):
    """Stands still until it is set forward."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_it_does_not_rest_while_things_move_and_then_longer_and_longer(clock):
    pace = Pace()
    assert [pace.rest_s(moved=True, soon=False) for _ in range(3)] == [0.0] * 3
    rests = [pace.rest_s(moved=False, soon=False) for _ in range(20)]
    assert rests[0] == SHORTEST_S and rests[-1] == LONGEST_S
    assert rests == sorted(rests)
    assert pace.rest_s(moved=True, soon=False) == 0.0
    assert pace.rest_s(moved=False, soon=False) == SHORTEST_S


def test_what_is_expected_soon_is_looked_for_all_along_for_a_while(clock):
    pace = Pace()
    assert pace.rest_s(moved=True, soon=True) == 0.0
    clock[0] += 0.99 * SOON_S
    assert [pace.rest_s(moved=False, soon=False) for _ in range(50)] == [SHORTEST_S] * 50
    clock[0] += 0.02 * SOON_S
    assert [pace.rest_s(moved=False, soon=False) for _ in range(20)][-1] == LONGEST_S
