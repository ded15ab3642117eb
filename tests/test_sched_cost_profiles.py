"""The named profiles and the A800 roofline against the paper's own points; `pytest -s` prints the errors.

The points are read off the plots of FAST25 figure 14 and of the report's figure 2.
"""

from itertools import product

import pytest

from mooncake_jax.errors import UsageError
from mooncake_jax.sched.fitting import fit_flows, fit_prefill, fit_transfer
from mooncake_jax.sched.profiles import A800_LLAMA2_70B, PROFILES, SCHEDULE_S, profile

K = 1024
KV_BYTES = 327_680  # of a token
# FAST25 figure 14: ktokens -> seconds of prefill, of prefill with 95 % reused, transfer, load, and 128 decoding steps.
FIG14 = {
    8: (1.00195, 0.135075, 0.0298611, 0.0289889, 3.39366),
    16: (2.05586, 0.226110, 0.0611674, 0.0553672, 3.43267),
    32: (4.47914, 0.406637, 0.1237800, 0.1081240, 3.52126),
    64: (10.5868, 0.880998, 0.2488100, 0.2134720, 3.65924),
    128: (27.5119, 2.328390, 0.4945650, 0.4205410, 3.93883),
}
SCHEDULE = (0.0508, 0.0482, 0.0534, 0.0384, 0.0412)
# Report figure 2: prefill of 8k, 16k, ... 128k over that of 128k; steps at 8k of batches 1, 2, ... 16 over the longest.
FIG2_PREFILL = (
    0.0336376, 0.0711103, 0.112482, 0.157929, 0.206733, 0.258637, 0.314515, 0.372872,
    0.437260, 0.504985, 0.576756, 0.653216, 0.733720, 0.819624, 0.908059, 1.0,
)  # fmt: skip
FIG2_DECODING = (
    0.801480, 0.801593, 0.801834, 0.826018, 0.832182, 0.840448, 0.861196, 0.876350,
    0.890530, 0.918288, 0.935795, 0.937830, 0.959694, 1.0, 0.991915, 0.994512,
)  # fmt: skip
COSTS = {"micro": PROFILES["micro"], "roofline": A800_LLAMA2_70B}


def errors(cost):
    """What is compared -> relative error of each point."""
    found = {name: [] for name in ("prefill", "prefill, 95 % reused", "transfer", "load", "decoding")}
    for k, seconds in FIG14.items():
        n, nbytes = k * K, k * K * KV_BYTES
        predicted = (
            cost.prefill(n, 0),
            cost.prefill(n, int(0.95 * n)),
            cost.transfer(nbytes),
            cost.load(nbytes),
            128 * cost.step(1, n + 64),
        )
        for name, ours, theirs in zip(found, predicted, seconds, strict=True):
            found[name].append(ours / theirs - 1)
    longest, alone = cost.prefill(128 * K, 0), cost.step(1, 8 * K)
    found["report's prefill shape"] = [
        cost.prefill(8 * (i + 1) * K, 0) / longest / share - 1 for i, share in enumerate(FIG2_PREFILL)
    ]
    found["report's decoding shape"] = [
        cost.step(b, b * 8 * K) / alone / (share / FIG2_DECODING[0]) - 1 for b, share in enumerate(FIG2_DECODING, 1)
    ]
    return found


# Worst errors that are allowed: what the fits reach, and a little.
BOUNDS = {
    "prefill": 0.015,
    "prefill, 95 % reused": 0.036,
    "transfer": 0.028,
    "load": 0.006,
    "decoding": 0.006,
    "report's prefill shape": 0.075,  # another model and engine than FAST25's
    "report's decoding shape": 0.033,  # it is not smooth
}


@pytest.mark.parametrize("name", COSTS)
def test_calibrated_to_the_papers_points(name):
    found = errors(COSTS[name])
    print()
    for what, values in found.items():
        worst = max(values, key=abs)
        print(f"{name}: {what}: worst relative error {worst:+.2%}, at most {BOUNDS[what]:.1%}")
    assert {what: max(map(abs, values)) <= BOUNDS[what] for what, values in found.items()} == dict.fromkeys(
        BOUNDS, True
    )


def test_the_calibration_is_the_least_squares_fit_of_the_points():
    constant, linear, quadratic = fit_prefill([(k * K, 0, seconds[0]) for k, seconds in FIG14.items()])
    # With a constant, which reuse could not spare (figure 8 and 10 are met without one).
    assert constant == pytest.approx(0.044, rel=0.01)
    assert (linear, quadratic) == pytest.approx(PROFILES["micro"].prefill_coefficients[1:], rel=0.06)
    transfer = fit_transfer([(k * K * KV_BYTES, seconds[2]) for k, seconds in FIG14.items()])
    assert transfer == pytest.approx(PROFILES["micro"].transfer_coefficients, rel=0.01)
    load = fit_transfer([(k * K * KV_BYTES, seconds[3]) for k, seconds in FIG14.items()])
    assert load == pytest.approx(PROFILES["micro"].load_coefficients, rel=0.01)


def test_the_schedule_constant_is_what_figure_14_shows():
    assert min(SCHEDULE) <= SCHEDULE_S <= max(SCHEDULE)


def test_transfers_share_a_link():
    moves = [(n, f, PROFILES["micro"].transfer(n, f)) for n, f in product((10**6, 10**9), (1, 2, 4))]
    (_, one), (_, further) = fit_flows(moves)
    assert one == pytest.approx(further)
    assert PROFILES["micro"].transfer(10**9, 4) == pytest.approx(4 * PROFILES["micro"].transfer(10**9))


VLLM_MS = [("vllm", 5.0), ("vllm-chunked", 5.0), ("vllm051", 4.75), ("vllm051-chunked", 4.75)]


@pytest.mark.parametrize(("name", "request_ms"), [("micro", 0.14), ("arxiv", 0.6), ("fast25", 3.6), *VLLM_MS])
def test_profiles_differ_in_what_one_more_request_costs_and_not_in_one_alone(name, request_ms):
    cost = profile(name)
    assert cost.step(1, 8 * K) == pytest.approx(0.0265)
    assert cost.step(9, 8 * K) - cost.step(8, 8 * K) == pytest.approx(request_ms / 1000)
    assert cost.prefill(64 * K, 0) >= profile("micro").prefill(64 * K, 0)


@pytest.mark.parametrize("name", ["vllm", "vllm051"])
def test_vllm_loads_nothing_it_reuses_and_pays_for_chunks(name):
    vllm, chunked = profile(name), profile(f"{name}-chunked")
    assert vllm.prefill(64 * K, 32 * K) == vllm.prefill_compute(64 * K, 32 * K)
    one_chunk = chunked.prefill_compute(3 * 2048, 2 * 2048) - vllm.prefill_compute(3 * 2048, 2 * 2048)
    assert one_chunk == pytest.approx(0.060)


def test_an_unknown_profile_names_those_there_are():
    with pytest.raises(UsageError, match="'mikro' is not known; use one of micro, arxiv, fast25, vllm, vllm-chunked"):
        profile("mikro")
