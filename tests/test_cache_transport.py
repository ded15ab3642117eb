"""How KVCache leaves a device, as far as it goes without one."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from device_array import DeviceArray

from mooncake_jax.cache import transport
from mooncake_jax.cache.transport import DeviceTransport, HostTransport, choose_transport, try_gpudirect
from mooncake_jax.cluster.launch import mpiexec_command
from mooncake_jax.errors import UsageError

PROGRAM = Path(__file__).parent / "ranks" / "device_exchange.py"


def has_cuda_driver():
    try:
        return bool(ctypes.CDLL("libcuda.so.1"))
    except OSError:
        return False


without_gpu = pytest.mark.skipif(has_cuda_driver(), reason="there may be a GPU here")


def exchange(platform):
    command, environment = [*mpiexec_command(2), sys.executable, PROGRAM], os.environ | {"JAX_PLATFORMS": platform}
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 0, result.stderr
    assert f"rank 0 sent from {platform.replace('cuda', 'gpu')}" in result.stdout
    return result


@pytest.mark.skipif(not has_cuda_driver(), reason="takes a GPU")
def test_mpi_gets_a_gpus_memory_as_it_is():
    chosen, found = choose_transport("auto", "gpu", 1)
    if not isinstance(chosen, DeviceTransport):
        pytest.skip(found)  # takes an MPI that reads device memory, too
    assert "rank 1 equal [True, True, True, True]" in exchange("cuda").stdout


def test_mpi_gets_device_memory_as_it_is_and_only_once_it_is_computed():
    result = exchange("cpu")
    assert "rank 0 read early [[False], [False]], fetched [0, 0]" in result.stdout
    assert "rank 1 equal [True, True, True, True]" in result.stdout


@pytest.mark.parametrize("interface", ["dlpack", "cuda"])
def test_rows_in_device_memory_are_where_the_array_is(interface):
    bits = np.arange(60, dtype=np.uint16).reshape(2, 5, 6)
    array = DeviceArray(bits, interface)
    rows = DeviceTransport().rows(array)
    assert [row.address for row in rows] == [bits[0].ctypes.data, bits[1].ctypes.data]
    assert [row.nbytes for row in rows] == [60, 60]
    assert array.read_early == [False] and array.fetched == 0


def test_through_host_memory_an_array_is_fetched_once():
    array = DeviceArray(np.arange(12, dtype=np.uint16).reshape(2, 6))
    rows = HostTransport().rows(array)
    assert [row.tolist() for row in rows] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert array.fetched == 1


def test_a_cpu_has_no_device_memory():
    chosen, found = choose_transport("auto", "cpu", 1)
    assert isinstance(chosen, HostTransport)
    assert found == "KVCache is sent through host memory: devices are of platform cpu, not GPUs"
    problem = "^--transport=gpudirect: devices are of platform tpu, not GPUs; use --transport=auto or host$"
    with pytest.raises(UsageError, match=problem):
        choose_transport("gpudirect", "tpu", 1)


def test_host_memory_can_be_asked_for():
    chosen, found = choose_transport("host", "gpu", 1)
    assert isinstance(chosen, HostTransport)
    assert found == "KVCache is sent through host memory, as --transport=host asks"


def test_a_kvcache_on_several_devices_goes_through_host_memory():
    chosen, found = choose_transport("auto", "gpu", 2)
    assert isinstance(chosen, HostTransport)
    assert found.endswith("KVCache is spread over 2 devices")


def test_device_memory_is_sent_where_mpi_says_it_can_and_a_trial_agrees(monkeypatch, tmp_path):
    monkeypatch.setattr(transport, "mpi_knows_cuda", lambda: True)
    monkeypatch.setattr(sys, "executable", program(tmp_path, "exit 0"))
    chosen, found = choose_transport("gpudirect", "gpu", 1)
    assert isinstance(chosen, DeviceTransport)
    assert found == "KVCache is sent from device memory (GPUDirect)"


@pytest.mark.skipif(transport.mpi_knows_cuda(), reason="this MPI knows CUDA")
def test_an_mpi_that_does_not_know_cuda_is_named():
    with pytest.raises(UsageError, match=r"^--transport=gpudirect: (Open MPI|MPICH).* does not know CUDA; use"):
        choose_transport("gpudirect", "gpu", 1)


def program(folder, line):
    """Stands for the interpreter that the trial is run with."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return str(path)


@without_gpu
def test_a_trial_without_a_gpu_says_what_is_missing():
    assert "libcuda.so.1" in try_gpudirect()


@pytest.mark.parametrize(
    "line, reason",
    [
        ("kill -SEGV $$", "a trial with 1 KiB failed (it ended with -11)"),
        ("echo first >&2; echo MPI has sent something else >&2; exit 1",
         "a trial with 1 KiB failed (MPI has sent something else)"),
        ("exec sleep 60", "a trial with 1 KiB took more than 0.5 s"),
        ('test -z "$PMIX_RANK$OMPI_COMM_WORLD_RANK$PMI_RANK"', None),
    ],
    ids=["it crashes", "it fails", "it hangs", "it is no rank of this job"],
)  # fmt: skip
def test_whatever_becomes_of_a_trial_is_told(monkeypatch, tmp_path, line, reason):
    for name in ("PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(sys, "executable", program(tmp_path, line))
    if reason is not None and "more than" in reason:
        monkeypatch.setattr(transport, "TRIAL_DEADLINE_S", 0.5)
    assert try_gpudirect() == reason
