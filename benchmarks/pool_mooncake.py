"""Mooncake's own store on TCP loopback, for pool_transfers.py to compare with, where it is installed: a master, a
process that lends memory, and this client, which puts there and gets from there, through registered memory.

    python benchmarks/pool_mooncake.py client|owner MASTER_PORT

The client prints median seconds by size and operation as JSON.
"""

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

SIZES = (4096, 5 << 18, 20 << 20)  # bytes
REPEATS = 24
LENT_BYTES, LOCAL_BYTES = 2 << 30, 1 << 28
DEADLINE_S = 120.0


def installed() -> bool:
    return importlib.util.find_spec("mooncake") is not None


def measure(ports: tuple[int, int, int, int]) -> dict[str, dict[str, float]]:
    """By size: seconds of a put and a get. ports: free ones. Raises RuntimeError if it does not run here."""
    master_port, metrics_port, *own = map(str, ports)
    with ExitStack() as stack:
        master = [Path(sys.executable).parent / "mooncake_master", "--rpc_address=127.0.0.1"]
        _start(
            stack, *master, f"--rpc_port={master_port}", f"--metrics_port={metrics_port}", "--metrics_host=127.0.0.1"
        )
        owner = _start(stack, sys.executable, __file__, "owner", master_port, own[0])
        if owner.stdout.readline().strip() != "ready":
            raise RuntimeError(
                f"the process that lends memory to Mooncake's store failed: {owner.stderr.read()[-500:]}"
            )
        client = _start(stack, sys.executable, __file__, "client", master_port, own[1])
        output, error = client.communicate(timeout=DEADLINE_S)
    if client.returncode:
        raise RuntimeError(f"Mooncake's client failed: {error[-500:]}")
    return json.loads(output.splitlines()[-1])


def _start(stack: ExitStack, *command) -> subprocess.Popen:
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    stack.callback(process.kill)
    return process


def connect(lent: int, master_port: str, port: str):
    """A store that lends so many bytes."""
    from mooncake.store import MooncakeDistributedStore  # not everywhere

    store, tries = MooncakeDistributedStore(), 50
    setting = (f"127.0.0.1:{port}", "P2PHANDSHAKE", lent, LOCAL_BYTES, "tcp", "", f"127.0.0.1:{master_port}")
    while store.setup(*setting):  # the master may not listen yet
        tries -= 1
        if not tries:
            raise RuntimeError("Mooncake's master does not answer")
        time.sleep(0.2)
    return store


def lend(master_port: str, port: str) -> None:
    store = connect(LENT_BYTES, master_port, port)
    print("ready", flush=True)
    time.sleep(DEADLINE_S)
    store.close()


def put_and_get(master_port: str, port: str) -> None:
    store = connect(0, master_port, port)
    source, target = (np.ones(max(SIZES), np.uint8) for _ in range(2))
    for memory in (source, target):
        if store.register_buffer(memory.ctypes.data, memory.nbytes):
            raise RuntimeError("Mooncake's store registers no memory")
    figures = {}
    for size in SIZES:
        puts, gets = [], []
        for repeat in range(REPEATS + 1):
            key, begun = f"{size}-{repeat}", time.perf_counter()
            code = store.put_from(key, source.ctypes.data, size)
            put = time.perf_counter()
            got = store.get_into(key, target.ctypes.data, size)
            if code or got != size:
                raise RuntimeError(f"put says {code}, get {got}")
            puts.append(put - begun)
            gets.append(time.perf_counter() - put)
        figures[size] = {"put": statistics.median(puts[1:]), "get": statistics.median(gets[1:])}
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    {"owner": lend, "client": put_and_get}[sys.argv[1]](*sys.argv[2:])
