"""The search for goodput: bisection against a brute-force grid, and what it says where there is nothing to find."""

import pytest
from simulated import COST, make_config, random_requests

from mooncake_jax.commands.sweep_file import GoodputSearch
from mooncake_jax.commands.sweep_goodput import FOUND, HIGHEST_KEEPS, LOWEST_FAILS, Bracket, bisect, most_tries
from mooncake_jax.metrics import summarise
from mooncake_jax.request import SLO
from mooncake_jax.simulate.run import simulate

SLO_HERE = SLO(1.0, 0.05)


def drive(search, attainment):
    """The bracket, and the speeds that were tried."""
    tries, tried = bisect(search), []
    speed = next(tries)
    while True:
        tried.append(speed)
        try:
            speed = tries.send(attainment(speed))
        except StopIteration as found:
            return found.value, tried


def simulated_attainment(speed):
    """Of 150 requests of four conversations, so many times as fast."""
    requests = random_requests(7, 150, rate=2.0 * speed)
    run = simulate(make_config(admission="none"), COST, requests)
    return summarise(run.outcomes, SLO_HERE, run.duration_s)["attainment"]


def test_the_bracket_is_where_a_grid_finds_it():
    search = GoodputSearch(attainment=0.9, lowest=0.25, highest=16.0, tolerance=0.1)
    bracket, tried = drive(search, simulated_attainment)
    grid = [0.25 * 1.1**step for step in range(44)]
    kept = [simulated_attainment(speed) >= 0.9 for speed in grid]
    last = max(place for place, good in enumerate(kept) if good)
    first = kept.index(False)
    assert bracket.answer == FOUND and bracket.failed <= bracket.kept * 1.1
    assert grid[first - 1] / 1.1 <= bracket.kept <= grid[last] * 1.1
    assert simulated_attainment(bracket.kept) >= 0.9 > simulated_attainment(bracket.failed)
    assert len(tried) <= most_tries(search) < len(grid) / 4


@pytest.mark.parametrize("limit", [0.11, 1.0, 3.7, 15.9])
def test_a_sharp_edge_lies_in_the_bracket(limit):
    search = GoodputSearch(tolerance=0.001)
    bracket, tried = drive(search, lambda speed: float(speed <= limit))
    assert bracket.kept <= limit < bracket.failed <= bracket.kept * 1.001
    assert len(tried) <= most_tries(search)


def test_nothing_is_kept_or_all_is():
    assert drive(GoodputSearch(), lambda speed: 0.89) == (Bracket(None, 0.1), [0.1])
    assert drive(GoodputSearch(), lambda speed: 0.9) == (Bracket(16.0, None), [0.1, 16.0])
    assert (Bracket(None, 0.1).answer, Bracket(16.0, None).answer) == (LOWEST_FAILS, HIGHEST_KEEPS)
