"""How KVCache leaves a device: through host memory, or as it is, with an MPI that reads device memory (GPUDirect;
report 3).

Only sending differs: KVCache is received in the DRAM of the decoding instance. That an MPI says it can is not enough,
since a wrong answer ends the process: it is tried in another one first. Knows no JAX: an array is whatever has a shape,
block_until_ready(), and DLPack or the CUDA array interface.
"""

import ctypes
import os
import subprocess
import sys
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from mooncake_jax.cache.wire import Buffer, DeviceBuffer
from mooncake_jax.errors import UsageError

AUTO, HOST, GPUDIRECT = "auto", "host", "gpudirect"
GPU_PLATFORMS = ("gpu", "cuda")
TRIAL_DEADLINE_S = 60.0
# Of the process managers: the trial is to be an MPI job of its own.
_JOB_VARIABLES = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "SLURM_", "HYDI_", "HYDRA_")


class Transport(Protocol):
    def rows(self, array: Any) -> list[Buffer]:
        """The array's rows along its first axis, to be sent; waits until they are computed. Contiguous arrays only."""


class HostTransport:
    """Through host memory, which on a CPU is where the array is."""

    def rows(self, array: Any) -> list[Buffer]:
        return list(np.asarray(array))


class DeviceTransport:
    """Device memory as it is. MPI reads it in no order with the device's own work, so that must have ended. Bits travel
    as bytes, for neither MPI nor the CUDA array interface has bfloat16.
    """

    def rows(self, array: Any) -> list[Buffer]:
        array.block_until_ready()
        whole = MPI.buffer.frombuffer(_Ready(array) if hasattr(array, "__dlpack__") else array, readonly=True)
        count = array.shape[0]
        nbytes = whole.nbytes // count
        return [DeviceBuffer(whole.address + row * nbytes, nbytes, whole) for row in range(count)]


class _Ready:
    """DLPack of an array that is computed: there is no stream to wait for, which mpi4py asks with a number that not
    every framework knows. Unversioned, for want of arguments, since JAX before 0.12 has no other.
    """

    def __init__(self, array: Any):
        self._array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    def __dlpack__(self, stream: int | None = None) -> Any:
        return self._array.__dlpack__()


def choose_transport(wish: str, platform: str, devices: int) -> tuple[Transport, str]:
    """wish: auto, host or gpudirect; platform: of the devices, as JAX names it; devices: over which a KVCache is
    spread. With what was found, in one line. Raises UsageError if the wish cannot be met.
    """
    if wish == HOST:
        return HostTransport(), "KVCache is sent through host memory, as --transport=host asks"
    reason = why_not_gpudirect(platform, devices)
    if reason is None:
        return DeviceTransport(), "KVCache is sent from device memory (GPUDirect)"
    if wish == GPUDIRECT:
        raise UsageError(f"--transport=gpudirect: {reason}; use --transport=auto or host")
    return HostTransport(), f"KVCache is sent through host memory: {reason}"


def why_not_gpudirect(platform: str, devices: int) -> str | None:
    """Why MPI cannot be given device memory, in a few words; None if it can."""
    if platform not in GPU_PLATFORMS:
        return f"devices are of platform {platform}, not GPUs"
    if devices > 1:  # its heads lie apart, and are together where they are received
        return f"KVCache is spread over {devices} devices"
    if not mpi_knows_cuda():
        return f"{MPI.Get_library_version().split(',')[0].splitlines()[0].strip()} does not know CUDA"
    return try_gpudirect()


def mpi_knows_cuda() -> bool:
    """What the MPI library says of itself; False if it has nothing to say."""
    try:
        return bool(ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support())
    except (OSError, AttributeError):
        return False


def try_gpudirect() -> str | None:
    """Send 1 KiB of device memory in a process of its own; what went wrong there, or None."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_JOB_VARIABLES)}
    command = [sys.executable, "-m", "mooncake_jax.cache.gpudirect_trial"]
    try:
        trial = subprocess.run(
            command, capture_output=True, text=True, timeout=TRIAL_DEADLINE_S, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return f"a trial with 1 KiB took more than {TRIAL_DEADLINE_S:g} s"
    if trial.returncode == 0:
        return None
    last = (trial.stderr.strip().splitlines() or [f"it ended with {trial.returncode}"])[-1].strip()
    return f"a trial with 1 KiB failed ({last})"
