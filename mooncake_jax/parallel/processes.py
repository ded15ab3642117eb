"""One JAX runtime over the processes of one instance, so that its stages can share a mesh (paper section 5.1).

An instance is one failure unit: JAX ends its processes when one has given no sign of life for HEARTBEAT_S. No process
of another instance takes part, whatever launched them all. Knows nothing of MPI.
"""

import socket

import jax

HEARTBEAT_S = 10
JOIN_DEADLINE_S = 120


def join_processes(coordinator: str, processes: int, process: int) -> None:
    """Call it on each of so many processes before anything asks JAX for devices; process counts from 0, in the order of
    stages. coordinator: "host:port" where process 0 is to listen. Raises RuntimeError if not all come in time.
    """
    # All three are given, so that JAX looks for no cluster: it would find the whole MPI world.
    jax.distributed.initialize(
        coordinator,
        processes,
        process,
        initialization_timeout=JOIN_DEADLINE_S,
        heartbeat_timeout_seconds=HEARTBEAT_S,
    )


def free_address(host: str) -> str:
    """ "host:port" with a port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return f"{host}:{listener.getsockname()[1]}"
