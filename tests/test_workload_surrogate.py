"""Surrogates against each figure that they are fitted to, as the papers publish it."""

import hashlib
import math
from collections import Counter

import pytest

from mooncake_jax.cache.hit_rates import hit_rate
from mooncake_jax.errors import UsageError
from mooncake_jax.workload import published
from mooncake_jax.workload.statistics import block_uses, reuse, uses_cdf
from mooncake_jax.workload.surrogate import RATE, REPORT, REQUESTS, TOOL_AGENT, surrogate_name, surrogate_rows
from mooncake_jax.workload.trace import read_sourced, write_trace


@pytest.fixture(scope="module", params=[0, pytest.param(1, marks=pytest.mark.slow)])
def report(request):
    return surrogate_rows(REPORT, REQUESTS, RATE, request.param)


def kolmogorov(lengths, histogram):
    """The largest distance where figure 5 tells the distribution: at the edges of its bins."""
    below = [sum(length < edge for length in lengths) / len(lengths) for edge, _ in histogram.cdf()]
    return max(abs(found - share) for found, (_, share) in zip(below, histogram.cdf(), strict=True))


def test_the_published_figures_are_whole():
    assert sum(published.INPUT_LENGTHS.counts) == sum(published.OUTPUT_LENGTHS.counts) == published.REQUESTS
    assert published.INPUT_LENGTHS.cdf()[-1] == (pytest.approx(125_546), 1.0)
    assert published.OUTPUT_LENGTHS.cdf()[-1] == (pytest.approx(2000), 1.0)


def test_lengths_are_those_of_figure_5(report):
    assert kolmogorov([row.input_length for row in report], published.INPUT_LENGTHS) <= 0.02
    assert kolmogorov([row.output_length for row in report], published.OUTPUT_LENGTHS) <= 0.02


def test_means_are_the_reports(report):
    assert len(report) == 23_608
    assert sum(row.input_length for row in report) / len(report) == pytest.approx(7_590, rel=0.02)
    assert sum(row.output_length for row in report) / len(report) == pytest.approx(182, rel=0.02)


def test_block_uses_are_those_of_figure_6(report):
    cdf = dict(uses_cdf(block_uses(report)))
    for uses, share in published.BLOCK_USES.items():
        if uses <= 18:
            assert cdf[uses] == pytest.approx(share, abs=0.05), uses


def test_the_two_hottest_blocks_are_those_of_figure_6(report):
    hottest = block_uses(report).most_common(3)
    assert hottest[0][1] / len(report) == pytest.approx(10_937 / 23_608, abs=0.005)
    assert hottest[1][1] / len(report) == pytest.approx(9_202 / 23_608, abs=0.005)
    assert hottest[2][1] <= 42


def test_hit_rates_are_those_of_table_1(report):
    requests = [row.hash_ids for row in report]
    for capacity, rate in published.TABLE_1_LRU.items():
        found = hit_rate(requests, math.inf if capacity is None else capacity, "lru").rate
        assert found == pytest.approx(rate, abs=0.02), capacity


def test_rows_are_a_trace(report, tmp_path):
    write_trace(tmp_path / "surrogate.jsonl", report[:2000], "SURROGATE")
    assert read_sourced(tmp_path / "surrogate.jsonl") == (report[:2000], "SURROGATE")
    assert [row.timestamp for row in report] == sorted(row.timestamp for row in report)
    assert 3_590_000 < report[-1].timestamp < 3_600_000
    parents = {}
    for row in report:
        assert len(row.hash_ids) == -(-row.input_length // 512) == len(set(row.hash_ids))
        for parent, block in zip((None, *row.hash_ids), row.hash_ids):
            assert parents.setdefault(block, parent) == parent  # equal blocks come after equal prefixes


def test_tool_agent_has_its_mean_and_reuse():
    rows = surrogate_rows(TOOL_AGENT, REQUESTS, RATE, 0)
    assert sum(row.input_length for row in rows) / len(rows) == pytest.approx(8_596, rel=0.02)
    assert reuse(rows).block_share == pytest.approx(0.59, abs=0.02)
    assert reuse(rows).token_share == pytest.approx(0.59, abs=0.03)
    for tokens in (100_000, 1_000_000, 8_000_000, 100_000_000):
        found = hit_rate([row.hash_ids for row in rows], tokens // 512, "lru").rate
        assert found == pytest.approx(published.TOOL_AGENT_HIT_RATES[tokens], abs=0.03), tokens


@pytest.mark.parametrize("count", [1, 2, 10, 41])
def test_small_ones_have_as_many_requests_as_asked(count):
    rows = surrogate_rows(REPORT, count, 2.0, 3)
    assert [row.index for row in rows] == list(range(count))
    assert all(row.timestamp < 500 * count for row in rows)


def test_the_seed_decides_and_every_python_agrees(tmp_path):
    one, same, other = (surrogate_rows(REPORT, 500, RATE, seed) for seed in (0, 0, 1))
    assert one == same and Counter(row.input_length for row in one) != Counter(row.input_length for row in other)
    # Golden: the same bytes on every Python and machine, or simulations of it could not be compared.
    write_trace(tmp_path / "surrogate.jsonl", one, surrogate_name(REPORT, RATE, 0))
    digest = hashlib.sha256((tmp_path / "surrogate.jsonl").read_bytes()).hexdigest()
    assert digest == "1edb2bda010e9e74b8c0e7df8c00bce988ccf9301305e3f1f18049b4b885016e"


def test_it_says_what_it_is():
    for shape in (REPORT, TOOL_AGENT):
        assert surrogate_name(shape, RATE, 7).startswith("SURROGATE of ") and "seed 7" in surrogate_name(shape, RATE, 7)


@pytest.mark.parametrize(("name", "value"), [("requests", 0), ("rate", 0.0), ("rate", math.inf), ("seed", -1)])
def test_bad_flags_are_told(name, value):
    with pytest.raises(UsageError, match=f"^--{name}="):
        surrogate_rows(REPORT, **({"requests": 5, "rate": 1.0, "seed": 0} | {name: value}))
