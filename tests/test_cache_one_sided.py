"""Memory that real MPI ranks lend one another."""

import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_jax.cluster.launch import mpiexec_command

PROGRAM = Path(__file__).parent / "ranks" / "one_sided_reads.py"
COMMAND = mpiexec_command(3)
needs_ulfm = pytest.mark.skipif("ulfm" not in COMMAND, reason="only Open MPI with ULFM lets the other ranks live on")
NBYTES = 3 * (1 << 20) + 77


def run(case):
    """What the ranks print; with what they complain of."""
    result = subprocess.run([*COMMAND, sys.executable, PROGRAM, case], capture_output=True, text=True, timeout=120)
    return result.stdout, result.stdout + result.stderr


def test_memory_is_read_whole_and_in_part_also_while_its_owner_stands_still():
    said, told = run("reads")
    for rank, nbytes in ((0, 0), (1, NBYTES), (2, NBYTES)):
        # A rank is not told to read its own.
        works = [False, rank != 1, rank != 2]
        assert f"rank {rank} lends {nbytes}, zero True, works {works}, equal True" in said, told
    assert "rank 0 read from one that stands still: sent, equal True" in said, told
    assert "rank 0 note: read while its owner computes: rank 1 in " in said, told


def test_reads_of_what_is_not_lent_are_refused_and_others_can_be_given_up():
    said, told = run("refused")
    assert "rank 0 before: rank 1 lends no memory that can be read one-sided" in said, told
    assert "rank 0: rank 2 lends no memory that can be read one-sided" in said, told
    assert f"rank 0: rank 1 lends {1 << 26} bytes, not -1 to 0" in said, told
    assert f"rank 0: rank 1 lends {1 << 26} bytes, not {(1 << 26) - 1} to {(1 << 26) + 1}" in said, told
    ends = ["CancelledError", "TimeoutError not transferred within 0 s"]
    assert f"rank 0 cancelled True: {ends}, then sent, zero True" in said, told


def test_memory_is_there_but_not_to_be_read_if_a_rank_does_not_come():
    said, told = run("absent")
    for rank in (0, 1):
        note = "memory is read two-sided: not all ranks came in time"
        assert f"rank {rank} in time True, lends 1000, works False: {note}" in said, told


def test_memory_is_there_but_not_to_be_read_if_a_rank_gets_stuck_while_the_window_is_made():
    said, told = run("stuck")
    for rank in range(3):
        note = "memory is read two-sided: making the window took too long"
        assert f"rank {rank} in time True, lends 1000, works False: {note}" in said, told


@needs_ulfm
def test_memory_is_there_but_not_to_be_read_if_a_rank_dies_before_it_comes():
    said, told = run("death")
    for rank in (0, 1):
        assert f"rank {rank} lost [2], lends 1000, works False" in said, told


@needs_ulfm
def test_a_read_from_a_dead_rank_ends_with_that():
    said, told = run("death_of_an_owner")
    for rank in (0, 1):
        assert f"rank {rank} worked True: PeerLost rank 2 is lost" in said, told


def test_no_memory_is_read_past_a_modelled_link():
    said, told = run("limited")
    for rank in range(3):
        assert f"rank {rank} works [False, False, False]: memory is read two-sided: the link is modelled" in said, told
