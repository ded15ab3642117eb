"""The command on two hosts: network namespaces on this machine, with names and addresses of their own."""

import importlib
import sys
from pathlib import Path

import pytest
from cluster_run import REPLAY, replay, write_prompts
from test_cluster_replay import TINY, prompt

from mooncake_jax.cluster.launch import mpiexec_command
from mooncake_jax.request import COMPLETED

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def hosts():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        module = importlib.import_module("hosts")
    finally:
        sys.path.remove(str(BENCHMARKS))
    reason = module.why_not()
    if reason is not None:
        pytest.skip(reason)
    if "ulfm" not in mpiexec_command(1):
        pytest.skip("how mpiexec is told to start ranks on other hosts is written for Open MPI")
    with module.Hosts() as made:
        yield made


def test_a_pipeline_across_two_hosts_serves_the_tokens_of_one(hosts, tmp_path):
    """Conductor and the first stage on one host, the last stage and decoding on the other."""
    rows = [prompt("first", 700, seed=1), prompt("again", 700, seed=1, arrival_s=2.0), prompt("one", 1, arrival_s=2.0)]
    path = write_prompts(tmp_path / "prompts.jsonl", rows)
    flags = (TINY, f"--prompts={path}", "--prefill_chunk=64")
    on_one = replay(tmp_path / "one", *flags, "--prefill=1").rows()
    before = hosts.sent()
    one, other = hosts.names
    launch = ["--prtemca", "plm_ssh_agent", str(hosts.agent), "--host", f"{one}:2,{other}:2"]
    command = hosts.command(one, [*mpiexec_command(4), *launch, *REPLAY])
    run = replay(tmp_path / "two", *flags, "--prefill=1x2", command=command)
    assert run.code == 0, run.stderr
    rows = run.rows()
    assert {row["status"] for row in rows.values()} == {COMPLETED}
    assert {name: row["token_ids"] for name, row in rows.items()} == {n: r["token_ids"] for n, r in on_one.items()}
    assert rows["again"]["reused_tokens"] == on_one["again"]["reused_tokens"] == 688
    kvcache = 701 * run.summary()["settings"]["bytes_per_token"]
    assert hosts.sent() - before > kvcache / 2, "the first stage's KVCache and all activations cross the cable"
