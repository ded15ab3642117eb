"""Run by test_cache_transport.py on two ranks: rank 0 sends arrays as if they lay on a device, rank 1 receives them.
JAX's lie where JAX_PLATFORMS says.
"""

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from messenger_exchange import DEADLINE_S, Inbox
from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).parent.parent))
from device_array import DeviceArray

from mooncake_jax.cache.messenger import Messenger
from mooncake_jax.cache.transport import DeviceTransport

SHAPE = (2, 6000, 2, 128)  # rows of 3 MB, sent in pieces


def bits(number):
    return np.random.default_rng(number).integers(0, 1 << 15, SHAPE, np.uint16)


def main():
    comm, inbox = MPI.COMM_WORLD, Inbox()
    messenger = Messenger(comm, inbox)
    messenger.start()
    headers = [(name, (SHAPE[1:], SHAPE[1:])) for name in ("dlpack", "cuda", "jax bfloat16", "jax float16")]
    if comm.rank == 0:
        faked = [DeviceArray(bits(0), "dlpack"), DeviceArray(bits(1), "cuda")]
        real = [jnp.asarray(bits(2).view(jnp.bfloat16)), jnp.asarray(bits(3).view(np.float16))]
        for header, array in zip(headers, (*faked, *real), strict=True):
            sent = messenger.send_buffers(1, header, DeviceTransport().rows(array))
            del array  # MPI must keep what it reads
            sent.result(DEADLINE_S)
        print(f"rank 0 sent from {jnp.zeros(1).devices().pop().platform}")
        early = [array.read_early for array in faked]
        print(f"rank 0 read early {early}, fetched {[array.fetched for array in faked]}")
    else:
        inbox.wait(lambda: len(inbox.landed) == len(headers))
        equal = [np.array_equal(np.stack(inbox.arrays[h]), bits(i)) for i, h in enumerate(headers)]
        print(f"rank 1 equal {equal}")
    messenger.close()
    assert messenger.failure is None, messenger.failure


main()
