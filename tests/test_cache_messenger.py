"""Messenger between real MPI ranks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_jax.cluster.launch import mpiexec_command

PROGRAM = Path(__file__).parent / "ranks" / "messenger_exchange.py"
COMMAND = mpiexec_command(3)
needs_ulfm = pytest.mark.skipif("ulfm" not in COMMAND, reason="only Open MPI with ULFM lets the other ranks live on")


def run(case, *link_gbps):
    command = [*COMMAND, sys.executable, PROGRAM, case, *link_gbps]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("link_gbps", [[], ["0.2"]], ids=["no limit", "0.2 Gbps"])
def test_messages_and_buffers_arrive_whole_and_in_order(link_gbps):
    result = run("order", *link_gbps)
    assert result.returncode == 0, result.stderr
    assert "rank 0 sent all" in result.stdout
    assert "rank 1 in order True, buffers equal True" in result.stdout


@needs_ulfm
def test_a_dead_peer_is_reported_once_and_the_others_go_on():
    result = run("death")
    for rank in (0, 1):
        assert f"rank {rank} lost [2], then: rank 2 is lost" in result.stdout, result.stdout + result.stderr


def test_a_link_is_never_faster_than_its_rate_and_messages_do_not_wait_behind_buffers():
    result = run("rate", "0.16")
    assert result.returncode == 0, result.stderr
    [told] = re.findall(r"rank 0 took (.*) and (.*) s for (.*) bytes of (.*)", result.stdout)
    left, landed, sent, buffers = map(float, told)
    assert buffers < sent < buffers + 10_000
    assert buffers / 0.02e9 <= left <= landed < 5 * buffers / 0.02e9
    for rank in (1, 2):
        assert f"rank {rank} landed 0 of 4 before the message, equal True" in result.stdout


@needs_ulfm
def test_a_peer_that_dies_in_the_middle_of_slow_transfers_is_reported_and_the_rest_dropped():
    result = run("death_underway", "0.08")
    told = result.stdout + result.stderr
    landed = "('still here', ((1000,),))"
    assert "rank 0 lost [2], then: rank 2 is lost, landed [], all was sent False" in result.stdout, told
    assert f"rank 1 lost [2], landed [{landed}]" in result.stdout, told


def test_closing_waits_for_a_slow_rest_to_the_deadline_only():
    result = run("close_underway", "0.08")
    told = result.stdout + result.stderr
    assert "rank 0 quiet False, in time True" in result.stdout, told
    assert "rank 1 quiet False, in time True" in result.stdout, told
    assert "rank 2 quiet True, in time True" in result.stdout, told


def test_closing_sends_a_slow_rest_where_there_is_time():
    result = run("close_after_the_rest", "0.08")
    assert result.returncode == 0, result.stderr
    assert "rank 0 quiet True, sent True" in result.stdout
    assert "rank 1 landed 1000000" in result.stdout
