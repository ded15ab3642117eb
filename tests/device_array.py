"""An array that looks as if it lay on a device: its bits are reached by DLPack or the CUDA array interface alone."""

import numpy as np


class DeviceArray:
    """Host memory behind a device array's interface: "dlpack" or "cuda". Says of each reader whether it came before
    the array was ready, and counts copies to the host.
    """

    def __init__(self, bits: np.ndarray, interface: str = "dlpack"):
        self._bits, self._ready = bits, False
        self.shape, self.dtype = bits.shape, bits.dtype
        self.read_early: list[bool] = []
        self.fetched = 0
        if interface == "dlpack":
            self.__class__ = _WithDLPack
        else:
            self.__class__ = _WithCUDA

    def block_until_ready(self):
        self._ready = True
        return self

    def __array__(self, dtype=None, copy=None):
        self.fetched += 1
        return self._bits


class _WithDLPack(DeviceArray):
    def __dlpack_device__(self):
        return self._bits.__dlpack_device__()

    def __dlpack__(self, **options):
        self.read_early.append(not self._ready)
        return self._bits.__dlpack__(**options)


class _WithCUDA(DeviceArray):
    @property
    def __cuda_array_interface__(self):
        self.read_early.append(not self._ready)
        return self._bits.__array_interface__ | {"version": 3}
