"""Polynomial costs and their fitting: known polynomials come back, no coefficient is negative, times are bit-equal."""

import pytest

from mooncake_jax.sched.cost import PolynomialCost
from mooncake_jax.sched.fitting import (
    fit_flows,
    fit_prefill,
    fit_prefill_and_prefix,
    fit_step,
    fit_transfer,
    hold_out,
    relative_errors,
)

TRUE = PolynomialCost(
    (0.02, 1.5e-3, 2e-7),
    (0.03, 2e-3, 1e-6),
    (1e-4, 2e-10),
    prefix_coefficients=(0.05, 2e-5),
    flow_coefficients=(3e-5, 1e-10),
    load_coefficients=(1e-3, 1e-10),
    ssd_read_coefficients=(2e-3, 5e-10),
    ssd_write_coefficients=(4e-3, 7e-10),
)
LENGTHS = [(32, 0), (128, 0), (512, 0), (512, 256), (2048, 0), (2048, 1900), (2048, 700)]


def test_fits_recover_the_polynomials_that_made_the_points():
    prefill = [(t, p, TRUE.prefill_compute(t, p)) for t, p in LENGTHS]
    step = [(b, c, TRUE.step(b, c)) for b, c in [(1, 100), (4, 400), (16, 1600), (1, 4000)]]
    transfer = [(n, TRUE.transfer(n)) for n in (1000, 10**6, 10**8)]
    assert fit_prefill(prefill) == pytest.approx(TRUE.prefill_coefficients, rel=1e-6)
    assert fit_step(step) == pytest.approx(TRUE.step_coefficients, rel=1e-6)
    assert fit_transfer(transfer) == pytest.approx(TRUE.transfer_coefficients, rel=1e-6)


def test_fits_tell_reuse_from_computing_and_flows_from_bytes():
    prefill, prefix = fit_prefill_and_prefix([(t, p, TRUE.prefill(t, p)) for t, p in LENGTHS])
    assert prefill == pytest.approx(TRUE.prefill_coefficients, rel=1e-6)
    assert prefix == pytest.approx(TRUE.prefix_coefficients, rel=1e-6)
    moves = [(n, f, TRUE.transfer(n, f)) for n in (10**5, 10**6, 10**8) for f in (1, 2, 5)]
    transfer, flow = fit_flows(moves)
    assert transfer == pytest.approx(TRUE.transfer_coefficients, rel=1e-6)
    assert flow == pytest.approx(TRUE.flow_coefficients, rel=1e-6)


def test_noise_never_makes_more_work_cheaper():
    noisy = [(64, 0, 0.10), (128, 0, 0.09), (256, 0, 0.11), (512, 0, 0.10)]
    coefficients = fit_prefill(noisy)
    assert min(coefficients) >= 0
    assert max(coefficients) > 0


def test_what_a_fit_is_judged_by_it_has_not_seen():
    points = [(i, float(i)) for i in range(11)]
    fitted, held = hold_out(points)
    assert held == [(1, 1.0), (4, 4.0), (7, 7.0)]
    assert sorted(fitted + held) == points
    assert points[0] in fitted and points[-1] in fitted
    assert hold_out(points[:2]) == (points[:2], [])


def test_errors_are_relative_to_what_was_measured():
    assert relative_errors(lambda a, b: a + b, [(1, 1, 4.0), (3, 5, 4.0)]) == [0.5, 1.0]


def test_each_part_by_hand():
    cost = PolynomialCost((1.0, 0.5, 0.25), (1.0, 2.0, 4.0), (1.0, 0.5), (8.0, 0.125), (2.0, 0.25))
    assert cost.prefill(4, 0) == 1.0 + 2.0 + 0.25 * 4 * 2
    assert cost.prefill(8, 4) == 1.0 + 2.0 + 0.25 * 4 * 6 + 8.0 + 0.5
    assert cost.prefill_compute(8, 4) == 1.0 + 2.0 + 0.25 * 4 * 6
    assert cost.step(3, 10) == 1.0 + 6.0 + 40.0
    assert cost.transfer(8) == 5.0
    assert cost.transfer(8, flows=3) == 5.0 + 2 * (2.0 + 2.0)
    assert (TRUE.load(10**7), TRUE.read_ssd(10**7), TRUE.write_ssd(10**7)) == pytest.approx((2e-3, 7e-3, 11e-3))


def test_chunks_add_up_to_the_whole_prompt():
    cost = PolynomialCost((0.0, 1e-4, 1e-9), (0.0, 0.0, 0.0), (0.0, 0.0))
    chunks = [cost.prefill_compute(end, end - 512) for end in range(512, 4097, 512)]
    assert sum(chunks) == pytest.approx(cost.prefill(4096, 0))


def test_times_are_the_same_bit_for_bit_everywhere():
    assert TRUE.prefill(12345, 678).hex() == "0x1.063954f87fd90p+5"
    assert TRUE.step(17, 98765).hex() == "0x1.4d57bc7f77af6p-3"
    assert TRUE.transfer(123456789, 3).hex() == "0x1.95da9ae83994fp-5"
