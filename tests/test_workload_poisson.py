"""The report's Poisson workloads, the made-up reuse, and the random numbers below them."""

import hashlib
import math

import pytest

from mooncake_jax.errors import UsageError
from mooncake_jax.workload.contexts import OPEN, USES, with_contexts
from mooncake_jax.workload.dice import Dice
from mooncake_jax.workload.poisson import WORKLOADS, poisson_rows
from mooncake_jax.workload.statistics import block_uses, reuse
from mooncake_jax.workload.trace import TraceRow, write_trace


@pytest.mark.parametrize(
    ("name", "input_length", "output_length", "reused"),
    [
        ("arxiv-summarization", 8_088, 229, 0.0),
        ("l-eval", 19_019, 72, 0.82),
        ("simulated-16k", 16_384, 512, 0.5),
        ("simulated-32k", 32_768, 512, 0.5),
        ("simulated-64k", 65_536, 512, 0.5),
        ("simulated-128k", 131_072, 512, 0.5),
    ],
)
def test_lengths_and_reuse_are_the_reports(name, input_length, output_length, reused):
    rows = poisson_rows(name, 1000, 2.0, 0)
    assert sum(row.input_length for row in rows) / 1000 == pytest.approx(input_length, rel=0.001)
    assert sum(row.output_length for row in rows) / 1000 == pytest.approx(output_length, rel=0.01)
    assert reuse(rows).block_share == pytest.approx(reused, abs=0.005)
    assert rows[-1].timestamp / 1000 == pytest.approx(500, rel=0.1)


def test_arrivals_are_poisson():
    """Gaps of an exponential distribution: their mean, their spread, and the share above the mean."""
    times = [row.timestamp for row in poisson_rows("arxiv-summarization", 8000, 0.001, 1)]
    gaps = [(late - early) / 1e6 for early, late in zip(times, times[1:])]
    mean = math.fsum(gaps) / len(gaps)
    assert mean == pytest.approx(1, rel=0.04)
    assert math.fsum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(1, rel=0.1)
    assert sum(gap > 1 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.02)


def test_the_seed_decides_and_every_python_agrees(tmp_path):
    one, same, other = (poisson_rows("l-eval", 100, 1.0, seed) for seed in (0, 0, 1))
    assert one == same != other
    assert [row.input_length for row in poisson_rows("l-eval", 100, 9.0, 0)] == [row.input_length for row in one]
    write_trace(tmp_path / "trace.jsonl", one, "")
    digest = hashlib.sha256((tmp_path / "trace.jsonl").read_bytes()).hexdigest()
    assert digest == "1cfb1869a58b944aa7bd7705477271d68c64b952c2a84feda91cdf55ee8e11d4"


def test_dice_are_the_same_everywhere():
    dice = Dice("test", 0)
    drawn = [dice.uniform(), dice.below(1000), dice.exponential(), dice.shuffled(range(6)), dice.strata(2)]
    assert drawn == [
        0.6343697436544338,
        713,
        1.3933117825009682,
        [5, 1, 4, 2, 3, 0],
        [0.31617084069687074, 0.6305170855766744],
    ]
    assert dice.shuffled([]) == dice.strata(0) == []
    assert sorted(dice.shuffled(range(50))) == list(range(50))


def rows_of(*lengths):
    return [TraceRow(place, length, 1, (), place) for place, length in enumerate(lengths)]


@pytest.mark.parametrize("wanted", [0.0, 0.05, 0.3, 0.6])
def test_contexts_give_the_reuse_that_is_wanted(wanted):
    dice = Dice("lengths")
    rows = rows_of(*[1 + dice.below(9000) for _ in range(3000)])
    made = with_contexts(rows, wanted, 5)
    assert reuse(made).block_share == pytest.approx(wanted, abs=0.002)
    assert max(block_uses(made).values()) <= USES
    parents = {}
    for before, row in zip(rows, made):
        assert (before.timestamp, before.input_length, before.index) == (row.timestamp, row.input_length, row.index)
        assert len(row.hash_ids) == -(-row.input_length // 512)
        for parent, block in zip((None, *row.hash_ids), row.hash_ids):
            assert parents.setdefault(block, parent) == parent


def test_contexts_are_in_use_at_a_time():
    """A context's prompts are neighbours: between its first and its last lie about OPEN times USES others."""
    made = with_contexts(rows_of(*[5120] * 4000), 0.5, 0)
    first, last = {}, {}
    for row in made:
        first.setdefault(row.hash_ids[0], row.index)
        last[row.hash_ids[0]] = row.index
    spans = [last[block] - first[block] for block in first]
    assert OPEN * USES / 2 < sum(spans) / len(spans) < OPEN * USES * 1.2


def test_reuse_that_cannot_be_is_told():
    with pytest.raises(UsageError, match=r"^a reuse of 0.9 cannot be: 1000 prompts .* reuse 0\.\d+ of their blocks"):
        with_contexts(rows_of(*[600] * 1000), 0.9, 0)
    for value in (-0.1, 1.0, math.nan):
        with pytest.raises(UsageError, match="^--reuse="):
            with_contexts(rows_of(600), value, 0)


@pytest.mark.parametrize(("name", "value"), [("requests", 0), ("rate", 0.0), ("rate", math.inf), ("seed", -1)])
def test_bad_flags_are_told(name, value):
    with pytest.raises(UsageError, match=f"^--{name}="):
        poisson_rows(next(iter(WORKLOADS)), **({"requests": 5, "rate": 1.0, "seed": 0} | {name: value}))
