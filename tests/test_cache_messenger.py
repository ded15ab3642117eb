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
        assert f"rank {rank} lost [2], then: PeerLost rank 2 is lost" in result.stdout, result.stdout + result.stderr


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
    assert "rank 0 lost [2], then: PeerLost rank 2 is lost, landed [], all was sent False" in result.stdout, told
    assert f"rank 1 lost [2], landed [{landed}]" in result.stdout, told
    assert "rank 0 broken [('big', 'rank 2 is lost')]" in result.stdout, told


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


def test_a_small_transfer_does_not_wait_for_all_of_a_large_one():
    result = run("in_turns", "0.8")
    assert result.returncode == 0, result.stderr
    assert "rank 0 sent the small ones, the large one False" in result.stdout
    assert "rank 1 landed ['small', 'big']" in result.stdout


def test_transfers_that_are_taken_back_or_overdue_end_on_both_sides_and_the_others_land():
    result = run("given_up", "0.8")
    told = result.stdout + result.stderr
    assert result.returncode == 0, told
    ends = ["TimeoutError not transferred within 0.2 s", *["CancelledError"] * 3]
    assert f"rank 0 took back [True, True, True]: {ends}, again True False" in result.stdout, told
    broken = [("big 0", "not transferred within 0.2 s"), *((f"big {number}", "cancelled") for number in range(1, 6))]
    assert f"rank 1 broken {broken}, landed {['small'] * 6}, whole True" in result.stdout, told


def test_a_deadline_ends_a_transfer_to_a_rank_that_stands_still():
    result = run("stopped")
    told = result.stdout + result.stderr
    assert "rank 0 TimeoutError not transferred within 0.5 s, the next waits True: sent" in result.stdout, told
    assert "rank 1 broken [(('big', ((32000000,),)), 'not transferred within 0.5 s')]" in result.stdout, told
    assert "landed [('small', ((1000,),), 0)]" in result.stdout, told


def test_whatever_is_taken_back_when_every_transfer_ends_once_and_whole():
    result = run("anything")
    told = result.stdout + result.stderr
    for rank in (0, 1):
        ends = ["CancelledError", "TimeoutError", "sent"]
        said = f"rank {rank} whole True, sent and landed True, once True, in order True, {ends}"
        assert said in result.stdout, told


def test_what_cannot_be_pickled_is_told_to_the_caller():
    result = run("unpicklable")
    assert "rank 0 TypeError, then sent" in result.stdout, result.stdout + result.stderr
