"""A real trace through the cluster, its lengths and blocks shrunk together."""

import pytest
from cluster_run import replay

from mooncake_jax.request import COMPLETED


@pytest.mark.slow
@pytest.mark.traces
def test_twenty_requests_of_the_conversation_trace_complete(tmp_path, traces, smollm2_path):
    flags = [f"--model={smollm2_path}", f"--trace={traces / 'conversation_trace.jsonl'}"]
    run = replay(tmp_path / "out", *flags, "--limit=20", "--length_scale=32", "--block_size=16")
    rows = run.rows()
    assert run.code == 0, run.stderr
    assert [row["status"] for row in rows.values()] == [COMPLETED] * 20
    assert sum(row["reused_tokens"] == 16 for row in rows.values()) >= 16, "block 0 is shared by all"
