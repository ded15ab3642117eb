"""Fitting the cost model: known polynomials come back, and no coefficient is negative."""

import pytest

from mooncake_jax.sched.cost import PolynomialCost
from mooncake_jax.sched.fitting import fit_prefill, fit_step, fit_transfer

TRUE = PolynomialCost((0.02, 1.5e-3, 2e-7), (0.03, 2e-3, 1e-6), (1e-4, 2e-10))


def test_fits_recover_the_polynomials_that_made_the_points():
    prefill = [
        (t, p, TRUE.prefill(t, p)) for t, p in [(32, 0), (128, 0), (512, 0), (512, 256), (2048, 0), (2048, 1900)]
    ]
    step = [(b, c, TRUE.step(b, c)) for b, c in [(1, 100), (4, 400), (16, 1600), (1, 4000)]]
    transfer = [(n, TRUE.transfer(n)) for n in (1000, 10**6, 10**8)]
    fitted = PolynomialCost(fit_prefill(prefill), fit_step(step), fit_transfer(transfer))
    assert fitted.prefill_coefficients == pytest.approx(TRUE.prefill_coefficients, rel=1e-6)
    assert fitted.step_coefficients == pytest.approx(TRUE.step_coefficients, rel=1e-6)
    assert fitted.transfer_coefficients == pytest.approx(TRUE.transfer_coefficients, rel=1e-6)


def test_noise_never_makes_more_work_cheaper():
    noisy = [(64, 0, 0.10), (128, 0, 0.09), (256, 0, 0.11), (512, 0, 0.10)]
    coefficients = fit_prefill(noisy)
    assert min(coefficients) >= 0
    assert max(coefficients) > 0
