"""mooncake-jax profile: measures a tiny model on two real ranks. Never how fast, nor how well it fits."""

import importlib.util
import os
import subprocess
import sys

import pytest
from conftest import DATA

from mooncake_jax.commands.profile_points import (
    LOAD,
    PREFILL,
    STEP,
    TRANSFER,
    fit_and_judge,
    predictor,
    shapes,
    spread,
)
from mooncake_jax.model.sources import model_fingerprint
from mooncake_jax.sched.cost_file import read_cost_file
from mooncake_jax.sched.cost_padded import PaddedCost

TINY = DATA / "tiny-llama2"
CHUNK = 512
TRUE = PaddedCost(
    (0.02, 1.5e-3, 2e-7),
    (0.03, 2e-3, 1e-6),
    (1e-4, 2e-10),
    prefix_coefficients=(0.05, 2e-5),
    flow_coefficients=(3e-5, 1e-10),
    load_coefficients=(1e-3, 1e-10),
    chunk=CHUNK,
)


def run(*flags, model=TINY, folder=None):
    command = [sys.executable, "-m", "mooncake_jax", "profile", f"--model={model}", *flags]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_"))}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, cwd=folder, env=environment
    )


def test_a_model_is_measured_and_fitted(tmp_path):
    out = tmp_path / "cost.json"
    done = run("--longest=128", "--max_batch=2", "--repeats=1", f"--out={out}")
    assert done.returncode == 0, done.stderr
    read = read_cost_file(out, str(TINY), model_fingerprint(TINY, "float32"))
    assert (read.range.tokens, read.range.batch, read.range.flows) == ((16, 128), (1, 2), (1, 4))
    # More work never seems cheaper, on any machine.
    assert 0 < read.cost.prefill(16, 0) <= read.cost.prefill(128, 0)
    assert 0 < read.cost.step(1, 16) <= read.cost.step(2, 256)
    assert 0 < read.cost.transfer(1 << 16) < read.cost.transfer(1 << 26) < read.cost.transfer(1 << 26, 4)
    for part in ("prefill by length and prefix", "decoding step by batch and context", "transfer by bytes and flows"):
        assert part in done.stdout
    assert "held out" in done.stdout and "P95" in done.stdout
    drawn = importlib.util.find_spec("matplotlib") is not None
    assert (tmp_path / "cost.png").exists() == drawn == ("no picture" not in done.stdout)


def points(longest=2048, max_batch=16, block_size=16, bytes_per_token=1000):
    """What a machine that is exactly TRUE would be measured as."""
    measured = shapes(longest, max_batch, block_size)
    return {
        PREFILL: [(t, p, TRUE.prefill(t, p)) for t, p in measured.prefill],
        STEP: [(b, b * c, TRUE.step(b, b * c)) for b, c in measured.steps],
        TRANSFER: [(n, f, TRUE.transfer(n, f)) for n, f in measured.transfers],
        LOAD: [(t * bytes_per_token, TRUE.load(t * bytes_per_token)) for t in measured.loads],
    }


@pytest.mark.parametrize(
    ("longest", "max_batch", "block_size"), [(2048, 16, 16), (64, 4, 16), (8192, 64, 16), (2048, 8, 512)]
)
def test_what_is_measured_determines_every_coefficient(longest, max_batch, block_size):
    cost, fits = fit_and_judge(points(longest, max_batch, block_size), CHUNK)
    for part, measured in points(longest, max_batch, block_size).items():
        for *arguments, seconds in measured:
            assert predictor(cost, part)(*arguments) == pytest.approx(seconds, rel=1e-4)
    assert set(fits) == {PREFILL, STEP, TRANSFER, LOAD}
    assert all(fit.worst < 1e-4 and fit.held_out >= 2 for fit in fits.values())


def test_errors_are_those_of_points_held_out():
    measured = points()
    *arguments, seconds = measured[PREFILL][1]
    measured[PREFILL][1] = (*arguments, 2 * seconds)  # held out: the fit does not see it
    cost, fits = fit_and_judge(measured, CHUNK)
    assert cost.prefill(2048, 0) == pytest.approx(TRUE.prefill(2048, 0), rel=1e-4)
    assert fits[PREFILL].worst == pytest.approx(0.5, rel=1e-3)
    assert fits[PREFILL].p50 < 1e-4 < fits[PREFILL].p95


def test_loads_lost_in_the_noise_leave_the_rest():
    cost, fits = fit_and_judge(points() | {LOAD: []}, CHUNK)
    assert cost.load(1000) == 0.0 and LOAD not in fits


def test_lengths_are_spread_evenly_and_are_no_powers_of_two():
    lengths = spread(16, 2048, 14)
    assert (lengths[0], lengths[-1], len(lengths)) == (16, 2048, 14)
    assert not any(length & (length - 1) == 0 for length in lengths[1:-1])
    assert spread(1, 1, 8) == [1] and spread(3, 5, 8) == [3, 4, 5]


@pytest.mark.parametrize("block_size", [1, 16, 100, 512, 4096])
def test_what_is_reused_is_whole_blocks_and_never_all_of_a_prompt(block_size):
    prefill = shapes(2048, 8, block_size).prefill
    assert len(set(prefill)) == len(prefill)
    assert all(prefix % block_size == 0 and prefix < tokens for tokens, prefix in prefill)
    assert any(prefix for _, prefix in prefill) == (block_size < 2048)


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        ("--repeats=0", "--repeats=0: it must be at least 1"),
        ("--max_batch=0", "--max_batch=0: it must be at least 1"),
        ("--max_batch=1000000000", "--max_batch=1000000000: steps of at most 1024 requests are measured; lower it"),
        ("--block_size=0", "--block_size=0: it must be at least 1"),
        ("--prefill_chunk=-1", "--prefill_chunk=-1: it must be at least 1"),
        ("--longest=63", "--longest=63: use 64 to 2032 tokens with this model"),
        ("--longest=2033", "--longest=2033: use 64 to 2032 tokens with this model"),
        ("--out=/dev/null/cost.json", "--out=/dev/null/cost.json: Not a directory; name a file in a folder"),
        ("--out=/tmp", "--out=/tmp is a folder; name a file, as in --out=/tmp/cost.json"),
        ("--dtype=int8", "--dtype=int8"),
        ("extra", "'extra' is no flag"),
    ],
)
def test_bad_flags_end_with_one_line_before_any_rank_starts(flag, complaint):
    done = run(flag)
    assert done.returncode == 2
    assert done.stderr.startswith("mooncake-jax profile: ") or "flag --dtype" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not done.stdout
    assert complaint.split("=")[0] in done.stderr if flag == "--dtype=int8" else complaint in done.stderr


def test_a_model_that_is_not_there_is_told():
    done = run(model="no-such-model")
    assert done.returncode == 2 and "no-such-model" in done.stderr
