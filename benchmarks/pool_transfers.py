"""The messenger against MPI itself, for pool.py: blocks and slices of them, messages beside them, reads of another
rank's memory, and puts and gets against Mooncake's own store.

Two ranks of this machine, each with a core for itself; nothing else should run. All figures of MPI and the messenger
are of one run, in turns.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pool_mooncake
from table import Row, at_least, at_most, row

from mooncake_jax.cluster.launch import OVER_TCP, mpiexec_command

RANKS = Path(__file__).parent / "pool_transfers_ranks.py"
DEADLINE_S = 300
NAMES = {4096: "4 KiB", 5 << 18: "1.25 MiB", 20 << 20: "20 MiB"}
LEAST = {20 << 20: at_least(0.8), 5 << 18: at_least(0.6)}  # of MPI's rate


def transfer_rows(turns: int = 5) -> Iterator[Row]:
    """turns: of which the median counts."""
    figures = measured("messenger", turns)
    yield from bulk_rows(figures)
    yield from control_rows(figures)
    yield from read_rows(figures)
    yield from mooncake_rows(turns)


def bulk_rows(figures: dict[str, float]) -> Iterator[Row]:
    for size, least in LEAST.items():
        limit = figures[f"raw {size}"] / 1e9
        yield row(f"MPI, {NAMES[size]}", limit, "GB/s")
        yield row(f"messenger, {NAMES[size]}, of MPI's", figures[f"ours {size}"] / 1e9, "GB/s", limit, least)


def control_rows(figures: dict[str, float]) -> Iterator[Row]:
    yield row("messages while blocks flow", figures["control rate"], "1/s", target=at_least(10_000))
    yield row("their median latency", figures["control latency"] * 1e3, "ms", target=at_most(0.5))
    yield row("their longest latency", figures["control worst"] * 1e3, "ms")
    yield row("blocks that flow meanwhile", figures["control bulk"] / 1e9, "GB/s")
    yield row("an idle messenger's share of a core", figures["idle"] * 100, "%", target=at_most(2))


def read_rows(figures: dict[str, float]) -> Iterator[Row]:
    if "read resting" not in figures:
        yield row("this MPI reads no memory one-sided", 0, "")
        return
    size, resting = 20 << 20, figures["read resting"]
    yield row(f"remote read, {NAMES[size]}", size / resting / 1e9, "GB/s")
    name = "remote read while its owner computes, of idle's"
    yield row(name, figures["read computing"] * 1e3, "ms", resting * 1e3, at_most(1.3))


def mooncake_rows(turns: int) -> Iterator[Row]:
    """Over TCP on the loopback, as its store is there."""
    if not pool_mooncake.installed():
        yield row("Mooncake's store is not installed", 0, "")
        return
    theirs, ours = pool_mooncake.measure(free_ports(4)), measured("stores", turns, OVER_TCP)
    for size, name in NAMES.items():
        for operation in ("put", "get"):
            rates = [size / found / 1e9 for found in (ours[f"{operation} {size}"], theirs[str(size)][operation])]
            label = f"{operation} over TCP, {name}, of Mooncake's store's"
            yield row(label, rates[0], "GB/s", rates[1], at_least(1.0))


def measured(what: str, turns: int, environment: dict[str, str] | None = None) -> dict[str, float]:
    """Run the two ranks. Raises RuntimeError with what they complain of."""
    command = [*mpiexec_command(2), sys.executable, str(RANKS), what, str(turns)]
    # Matrices of the computing owner on one core, so that each rank has one.
    variables = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"} | (environment or {})
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=variables, check=False)
    if done.returncode:
        raise RuntimeError(f"the ranks failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def free_ports(count: int) -> tuple[int, ...]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = tuple(one.getsockname()[1] for one in sockets)
    for one in sockets:
        one.close()
    return ports
