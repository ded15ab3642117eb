"""The published traces, which are not part of the project: read from MOONCAKE_TRACES, or ../shared/traces beside it."""

import warnings

import pytest

from mooncake_jax.workload.multiturn import ideal_reuse
from mooncake_jax.workload.trace import read_trace, trace_requests

pytestmark = pytest.mark.traces


@pytest.mark.parametrize(
    ("name", "count", "references", "distinct", "longest"),
    [
        ("conversation_trace.jsonl", 12_031, 288_500, 182_790, 126_195),
        ("synthetic_trace.jsonl", 3_993, 121_877, 43_924, 191_378),
    ],
)
def test_whole_traces_read(traces, name, count, references, distinct, longest):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # both are sorted
        rows = read_trace(traces / name)
    assert len(rows) == count
    assert sum(len(row.hash_ids) for row in rows) == references
    assert len({hash_id for row in rows for hash_id in row.hash_ids}) == distinct
    assert max(row.input_length for row in rows) == longest


@pytest.mark.parametrize("name", ["conversation_trace.jsonl", "synthetic_trace.jsonl"])
def test_scaled_requests_reuse_what_the_trace_reuses(traces, name):
    rows = read_trace(traces / name, limit=600)
    requests = trace_requests(rows, vocab_size=49152, seed=0, length_scale=32, block_size=16)
    known, expected = set(), []
    for row, request in zip(rows, requests):
        full = row.hash_ids[: row.input_length // 512]
        hits = next((place for place, hash_id in enumerate(full) if hash_id not in known), len(full))
        known.update(full)
        expected.append(min(16 * hits, request.prompt_tokens - 1))
    assert sum(expected) > 0
    assert ideal_reuse(requests, 16) == expected
