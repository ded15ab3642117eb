"""Latencies, attainment and the summary, on figures worked out by hand."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_jax.metrics import TokenTimes, attained, gaps_of, outcome, outcome_row, percentile, summarise
from mooncake_jax.request import COMPLETED, FAILED, REJECTED, SLO, Request, TokenLogprobs

ROW_KEYS = [
    *("id", "arrival_s", "priority", "ttft_slo", "tbt_slo", "prompt_tokens", "reused_tokens", "output_tokens"),
    *("status", "reason", "estimate", "limit", "ttft_s"),
    *(
        "tbt_mean_s",
        "tbt_p90_s",
        "tbt_top10_s",
        "prefill_instance",
        "decoding_instance",
        "token_ids",
        "text",
        "logprobs",
    ),
]


def ended(status=COMPLETED, times=(), arrival=0.0, prompt=10, ttft_slo=None, tbt_slo=None, **options):
    request = Request("r", arrival, prompt, 5, priority=3, ttft_slo=ttft_slo, tbt_slo=tbt_slo)
    return outcome(request, status, token_times=times, **options)


def times_of(first, gaps):
    times = [first]
    for gap in gaps:
        times.append(times[-1] + gap)
    return times


def test_percentile_by_hand():
    assert percentile([], 50) is None
    assert [percentile([3.0], q) for q in (0, 50, 100)] == [3.0] * 3
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([10.0, 20.0], 90) == 19.0
    with pytest.raises(ValueError, match="101"):
        percentile([1.0], 101)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.integers(0, 100))
def test_percentile_equals_numpy(values, q):
    assert percentile(values, q) == pytest.approx(float(np.percentile(values, q)), rel=1e-9, abs=1e-9)


def test_latencies_of_a_request():
    row = ended(times=[2.5, 3.0, 3.25, 4.25], arrival=2.0)
    assert (row.ttft_s, row.output_tokens) == (0.5, 4)
    assert row.tbt_mean_s == 1.75 / 3
    assert row.tbt_p90_s == pytest.approx(0.5 + 0.8 * 0.5)
    assert row.tbt_top10_s == 1.0


@pytest.mark.parametrize(("gaps", "longest"), [(1, 1), (10, 1), (11, 2), (20, 2), (21, 3), (30, 3)])
def test_top10_is_the_longest_tenth_rounded_up(gaps, longest):
    lengths = [2.0**-place for place in range(gaps)]
    row = ended(times=times_of(1.0, lengths[::2] + lengths[1::2]))
    assert row.tbt_top10_s == math.fsum(lengths[:longest]) / longest


def test_unknown_is_none():
    nothing, single = ended(FAILED), ended(times=[1.0])
    assert nothing.ttft_s is nothing.tbt_mean_s is nothing.tbt_p90_s is nothing.tbt_top10_s is None
    assert nothing.output_tokens == 0 and nothing.token_ids is None and nothing.reused_tokens is None
    assert single.ttft_s == 1.0 and single.tbt_mean_s is single.tbt_p90_s is single.tbt_top10_s is None


def test_a_failed_request_keeps_what_it_got():
    row = ended(FAILED, times=[1.0, 1.5], reason="peer lost", token_ids=[4, 5])
    assert (row.ttft_s, row.tbt_mean_s, row.output_tokens, row.token_ids) == (1.0, 0.5, 2, (4, 5))


def test_each_token_has_its_time():
    with pytest.raises(ValueError, match="request r: 1 token ids with 2 token times"):
        ended(times=[1.0, 2.0], token_ids=[7])


@pytest.mark.parametrize(
    ("row", "slo", "met"),
    [
        (ended(times=[1.0, 2.0]), SLO(1.0, 1.0), True),
        (ended(times=[1.0, 2.0]), SLO(0.9, 1.0), False),
        (ended(times=[1.0, 2.0]), SLO(1.0, 0.9), False),
        (ended(times=[1.0]), SLO(1.0, 0.0), True),
        (ended(times=[1.0, 2.0]), SLO(), True),
        (ended(times=[1.0, 2.0], ttft_slo=1.0, tbt_slo=1.0), SLO(0.5, 0.5), True),
        (ended(times=[1.0, 2.0], ttft_slo=0.9), SLO(), False),
        (ended(times=[1.0, 2.0], ttft_slo=0.9), SLO(9.0, 9.0), False),
        (ended(times=[1.0, 2.0], tbt_slo=0.9), SLO(), False),
        (ended(times=[1.0, 2.0], ttft_slo=2.0), SLO(0.5, 0.9), False),
        (ended(), SLO(), False),
        (ended(FAILED, times=[1.0, 2.0]), SLO(), False),
        (ended(REJECTED), SLO(), False),
    ],
)
def test_attained(row, slo, met):
    assert attained(row, slo) is met


def test_summary_by_hand():
    rows = [
        ended(times=[1.0, 1.5], prompt=100, reused_tokens=60),
        ended(times=[3.0, 3.25, 3.5], prompt=50, reused_tokens=0),
        ended(times=[1.0], prompt=30),  # its reuse is unknown: it counts on neither side of the share
        ended(FAILED, times=[1.0, 9.0], prompt=1000, reused_tokens=500, reason="peer lost"),
        ended(REJECTED, reason="too long"),
        ended(REJECTED, reason="overload"),
        ended(REJECTED, reason="overload"),
        ended(REJECTED),
    ]
    summary = summarise(rows, SLO(ttft=2.0), 4.0)
    assert summary["requests"] == {"total": 8, "completed": 3, "rejected": 4, "failed": 1}
    assert list(summary["reasons"]["rejected"].items()) == [("overload", 2), ("too long", 1), ("unknown", 1)]
    assert summary["reasons"]["failed"] == {"peer lost": 1}
    assert summary["tokens"] == {"prompt": 180, "reused": 60, "output": 6}
    assert summary["reuse_share"] == 60 / 150
    assert (summary["output_tokens_per_s"], summary["total_tokens_per_s"]) == (1.5, 46.5)
    assert summary["ttft_s"] == {"mean": 5 / 3, "p50": 1.0, "p90": pytest.approx(2.6), "p99": pytest.approx(2.96)}
    assert summary["tbt_mean_s"]["mean"] == 0.375 and summary["tbt_top10_s"]["p50"] == 0.375
    assert (summary["attained"], summary["attainment"], summary["goodput_requests_per_s"]) == (2, 0.25, 0.5)
    assert summary["slo"] == {"ttft_s": 2.0, "tbt_s": None}
    assert summary["duration_s"] == 4.0


def test_attainment_is_against_each_requests_own_slo():
    rows = [ended(times=[1.0, 2.0]), ended(times=[1.0, 2.0], ttft_slo=0.5), ended(times=[3.0], ttft_slo=4.0)]
    summary = summarise(rows, SLO(ttft=2.0), 4.0)
    assert (summary["attained"], summary["goodput_requests_per_s"]) == (2, 0.5)


def test_rejections_group_by_reason_and_keep_their_numbers():
    rows = [ended(REJECTED, reason="predicted TTFT is above the SLO", estimate=e, limit=2.0) for e in (2.5, 3.5)]
    assert summarise(rows, SLO(), 1.0)["reasons"]["rejected"] == {"predicted TTFT is above the SLO": 2}
    assert [(outcome_row(row)["estimate"], outcome_row(row)["limit"]) for row in rows] == [(2.5, 2.0), (3.5, 2.0)]


def test_what_json_lacks_is_null_in_a_row():
    row = outcome_row(ended(REJECTED, ttft_slo=math.inf, tbt_slo=0.5, estimate=math.inf, limit=math.nan))
    assert (row["ttft_slo"], row["tbt_slo"], row["estimate"], row["limit"]) == (None, 0.5, None, None)


@pytest.mark.parametrize("rows", [[], [ended(REJECTED, reason="x")], [ended(times=[1.0])]])
@pytest.mark.parametrize("duration_s", [0.0, 1.0, math.nan])
def test_summary_is_plain_json(rows, duration_s):
    summary = summarise(rows, SLO(), duration_s)
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_the_readme_lists_the_keys_in_their_order():
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    listed = readme.split("- `requests.jsonl`: ")[1].split("- `events.jsonl`: ")[0]
    names = [name.strip() for quoted in re.findall(r"`([^`]*)`", listed) for name in quoted.split(",")]
    assert names == [*ROW_KEYS, "logprob", "top"]


def test_row_keys_and_json():
    row = outcome_row(ended(times=[1.0, 2.0], token_ids=(3, 4), text="hi", prefill_instance="prefill0"))
    assert list(row) == ROW_KEYS
    assert row["priority"] == 3
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert row["token_ids"] == [3, 4] and row["reason"] is None and row["decoding_instance"] is None
    told = outcome_row(ended(times=[1.0], token_ids=(3,), logprobs=[TokenLogprobs(-0.5, ((3, -0.5), (9, -1.0)))]))
    assert json.loads(json.dumps(told))["logprobs"] == [{"logprob": -0.5, "top": [[3, -0.5], [9, -1.0]]}]


def test_tokens_told_in_pieces_are_those_told_at_once():
    times, pieces = (0.5, 0.75, 1.5, 1.5, 2.25), TokenTimes()
    for begin, end in ((0, 1), (1, 4), (4, 5)):
        pieces.add(times[begin:end], gaps_of(times[begin:end]))
    whole = TokenTimes(times)
    assert (pieces.first, pieces.last, pieces.gaps) == (whole.first, whole.last, whole.gaps)
    assert (whole.first, whole.last, whole.gaps) == (0.5, 2.25, [0.25, 0.75, 0.0, 0.75])
    assert len(pieces) == len(whole) == 5 and not TokenTimes()
