"""The command on two hosts: network namespaces on this machine, with names and addresses of their own."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_run import TINY, prompt, replay, write_prompts

from mooncake_jax.cluster.launch import mpiexec_command
from mooncake_jax.request import COMPLETED

ROOT = Path(__file__).parent.parent
BENCHMARKS, SCRIPTS = ROOT / "benchmarks", ROOT / "scripts"


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
    (tmp_path / "hosts").write_text(f"{one} slots=2  # Conductor and a stage\r\n{other}:2\n")
    environment = [f"PYTHON={sys.executable}", f"MPIEXEC_OPTIONS=--prtemca plm_ssh_agent {hosts.agent}"]
    launch = ["env", *environment, str(SCRIPTS / "mpi_hosts.sh"), str(tmp_path / "hosts")]
    run = replay(tmp_path / "two", *flags, "--prefill=1x2", command=hosts.command(one, launch))
    assert run.code == 0, run.stderr
    rows = run.rows()
    assert {row["status"] for row in rows.values()} == {COMPLETED}
    assert {name: row["token_ids"] for name, row in rows.items()} == {n: r["token_ids"] for n, r in on_one.items()}
    assert rows["again"]["reused_tokens"] == on_one["again"]["reused_tokens"] == 688
    kvcache = 701 * run.summary()["settings"]["bytes_per_token"]
    assert hosts.sent() - before > kvcache / 2, "the first stage's KVCache and all activations cross the cable"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "is no host file that can be read"),
        ("# none\na\nb:1\n", "gives 2 ranks"),
        ("a\nb slots=many\n", "'b slots=many' is no host with a number of ranks"),
        ("a max_slots=8 slots=2\n", "'a max_slots=8 slots=2' is no host"),
    ],
)
def test_a_host_file_that_cannot_be_is_refused(tmp_path, content, complaint):
    file = tmp_path / "hosts"
    if content is not None:
        file.write_text(content)
    done = subprocess.run([SCRIPTS / "mpi_hosts.sh", file], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and complaint in done.stderr and len(done.stderr.splitlines()) == 1


def gpus_of(rank, place, each="2"):
    ranks = {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": place}
    command = [SCRIPTS / "gpu_rank.sh", each, "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | ranks)


def test_ranks_of_a_machine_have_gpus_of_their_own():
    """Conductor none, beside it the first ranks; another host's ranks begin with its first GPU."""
    found = {place: gpus_of(*place.split()).stdout.strip() for place in ("0 0", "1 1", "2 2", "3 0", "4 1")}
    assert found == {"0 0": "", "1 1": "0,1", "2 2": "2,3", "3 0": "0,1", "4 1": "2,3"}
    refused = gpus_of("1", "1", each="many")
    assert refused.returncode == 2 and "'many' is no number of GPUs" in refused.stderr
