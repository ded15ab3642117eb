"""Messenger between real MPI ranks."""

import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_jax.cluster.launch import mpiexec_command

PROGRAM = Path(__file__).parent / "ranks" / "messenger_exchange.py"
COMMAND = mpiexec_command(3)


def run(case):
    return subprocess.run([*COMMAND, sys.executable, PROGRAM, case], capture_output=True, text=True, timeout=120)


def test_messages_and_buffers_arrive_whole_and_in_order():
    result = run("order")
    assert result.returncode == 0, result.stderr
    assert "rank 0 sent all" in result.stdout
    assert "rank 1 in order True, buffers equal True" in result.stdout


@pytest.mark.skipif("ulfm" not in COMMAND, reason="only Open MPI with ULFM lets the other ranks live on")
def test_a_dead_peer_is_reported_once_and_the_others_go_on():
    result = run("death")
    for rank in (0, 1):
        assert f"rank {rank} lost [2], then: rank 2 is lost" in result.stdout, result.stdout + result.stderr
