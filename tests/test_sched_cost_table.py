"""Costs from measured points: through every point, straight between them, never down beyond the last."""

import random
from itertools import pairwise

import pytest

from mooncake_jax.errors import UsageError
from mooncake_jax.sched.cost_table import TableCost

LINKS = {
    "transfer_coefficients": (0.0, 1e-9),
    "flow_coefficients": (0.0, 1e-9),
    "load_coefficients": (0.0, 1e-10),
    "ssd_read_coefficients": (0.0, 1e-9),
    "ssd_write_coefficients": (0.0, 1e-9),
}
PREFILL = ((0, ((16, 1.0), (32, 3.0), (64, 4.0))), (100, ((10, 2.0), (50, 6.0))), (200, ((20, 8.0),)))
STEPS = ((1, ((100, 0.5), (200, 0.75))), (4, ((400, 1.0), (800, 0.8))))


def table(prefill=PREFILL, steps=STEPS):
    return TableCost(prefill, steps, **LINKS)


def test_measured_points_come_back():
    cost = table()
    for prefix, points in PREFILL:
        assert [cost.prefill(prefix + new, prefix) for new, _ in points] == [seconds for _, seconds in points]
    for batch, points in STEPS:
        assert [cost.step(batch, context) for context, _ in points] == [seconds for _, seconds in points]


@pytest.mark.parametrize(
    ("tokens", "prefix", "seconds"),
    [
        (24, 0, 2.0),  # half of the way from 16 to 32
        (1, 0, 1.0),  # before the first
        (128, 0, 6.0),  # beyond the last: from 32 to 64 by 1, so by 2 in 64 more
        (130, 100, 4.0),
        (50 + 32, 50, (3.0 + 4.2) / 2),  # half of the way between the rows
        (300 + 20, 300, 8.0 + (8.0 - 3.0)),  # beyond the last row: what led to it from row 100 (3.0 at 20) goes on
    ],
)
def test_between_and_beyond_points(tokens, prefix, seconds):
    assert table().prefill(tokens, prefix) == pytest.approx(seconds)


def test_beyond_the_last_point_nothing_gets_cheaper():
    cost = table()
    assert cost.step(4, 100_000) == 0.8  # the row goes down there
    assert cost.step(1, 300) == 1.0


def test_predictions_never_leave_what_neighbours_measured():
    rng = random.Random(0)
    cost = table()
    for _ in range(1000):
        prefix, new = rng.randrange(100), rng.randrange(10, 64)
        low = [s for _, points in PREFILL[:2] for _, s in points]
        assert min(low) <= cost.prefill(prefix + new, prefix) <= max(low) + 1.4  # row 100 goes on beyond 50


def test_a_single_row_serves_all():
    cost = table(prefill=PREFILL[:1], steps=((2, ((10, 0.25),)),))
    assert cost.prefill(1032, 1000) == 3.0
    assert cost.step(64, 1) == 0.25


def test_more_context_costs_more_where_it_was_measured_to():
    seconds = [table().prefill(tokens, 0) for tokens in range(16, 200)]
    assert all(before <= after for before, after in pairwise(seconds))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"prefill": ()}, "prefill_rows has no points"),
        ({"steps": ((1, ()),)}, "step_rows has no points"),
        ({"prefill": ((5, ((1, 1.0),)), (5, ((1, 1.0),)))}, "prefill_rows goes 5, 5; it must ascend"),
        ({"steps": ((1, ((9, 1.0), (8, 1.0))),)}, "step_rows goes 9, 8; it must ascend"),
        ({"steps": ((1, ((9, -1e-9),)),)}, "step_rows says -1e-09 s at 1, 9"),
        ({"steps": ((1, ((9, float("nan")),)),)}, "step_rows says nan s at 1, 9"),
    ],
)
def test_rows_that_are_no_measurement_are_refused(change, complaint):
    with pytest.raises(UsageError, match=complaint):
        table(**change)
