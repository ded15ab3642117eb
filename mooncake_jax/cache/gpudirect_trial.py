"""Does MPI read device memory? Run as a process of its own (transport.py), since an MPI that does not may crash: exit
code 0 if it does.
"""

import ctypes

import numpy as np
from mpi4py import MPI

NBYTES = 1024


def main() -> None:
    sent, received = np.arange(NBYTES, dtype=np.uint8), np.zeros(NBYTES, np.uint8)
    device = MPI.buffer.fromaddress(_in_device_memory(sent), NBYTES, readonly=True)
    request = MPI.COMM_SELF.Irecv([received, MPI.BYTE], 0)
    MPI.COMM_SELF.Send([device, MPI.BYTE], 0)
    request.Wait()
    if not np.array_equal(sent, received):
        raise SystemExit("MPI has sent something else")


def _in_device_memory(data: np.ndarray) -> int:
    """Address of a copy on the first GPU, allocated as frameworks do, through the driver alone."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    for name, *arguments in (
        ("cuInit", 0),
        ("cuDeviceGet", ctypes.byref(device), 0),
        ("cuDevicePrimaryCtxRetain", ctypes.byref(context), device),
        ("cuCtxSetCurrent", context),
        ("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(data.nbytes)),
        ("cuMemcpyHtoD_v2", address, ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(data.nbytes)),
    ):
        if code := getattr(cuda, name)(*arguments):
            raise SystemExit(f"{name} says {code}")
    return address.value


if __name__ == "__main__":
    main()
