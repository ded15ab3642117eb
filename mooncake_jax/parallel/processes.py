"""One JAX runtime over the processes of one instance, so that its stages can share a mesh (paper section 5.1).

An instance is one failure unit: JAX ends its processes when one has given no sign of life for HEARTBEAT_S. No process
of another instance takes part, whatever launched them all. Knows nothing of MPI.
"""

import socket

import jax

from mooncake_jax.errors import UsageError

HEARTBEAT_S = 8  # and what follows from a missing one within 10
JOIN_DEADLINE_S = 120
LEAVE_DEADLINE_S = 3
WARM_UP_DEADLINE_S = 3600  # a process that dies meanwhile ends the others much sooner


def join_processes(coordinator: str, processes: int, process: int) -> None:
    """Call it on each of so many processes before anything asks JAX for devices; process counts from 0, in the order of
    stages. coordinator: "host:port" where process 0 is to listen. Raises RuntimeError if not all come in time.
    """
    jax.distributed.initialize(
        coordinator,
        processes,
        process,
        cluster_detection_method="deactivate",  # it would find the whole MPI world, and wait for it
        initialization_timeout=JOIN_DEADLINE_S,
        heartbeat_timeout_seconds=HEARTBEAT_S,
        shutdown_timeout_seconds=LEAVE_DEADLINE_S,
    )


def wait_for_all(what: str) -> None:
    """Until each process of the instance has called this; nothing where there is one. To be done before the first
    exchange between processes: on CPUs it gives all of them 30 s to come, while one stage may take minutes longer to
    compile than another. Raises jax.errors.JaxRuntimeError if not all come in time.
    """
    from orbax.checkpoint import multihost  # it takes a second to import, which single processes need not wait for

    multihost.get_barrier_sync_fn()(key=what, timeout_ms=1000 * WARM_UP_DEADLINE_S)


def leave_processes() -> None:
    """In good order: call it on each process once none computes any more. A process that just ends is taken for dead,
    and the others with it.
    """
    jax.distributed.shutdown()


def free_address(host: str) -> str:
    """ "host:port" with a port that nobody listens on now; localhost if nobody knows the host by this name."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return f"{host if _is_known(host) else 'localhost'}:{listener.getsockname()[1]}"


def use_cpu_devices(count: int) -> None:
    """Where JAX runs on CPUs, with so many devices in this process; call it before anything asks for devices."""
    jax.config.update("jax_num_cpu_devices", count)


def stage_devices(tp: int) -> list[jax.Device]:
    """The first tp devices of each process, in the order of processes. Raises UsageError if this one has fewer."""
    own = len(jax.local_devices())
    if own < tp:
        raise UsageError(f"--tp={tp}: a stage has the devices of one process, here {own}; use at most so many")
    processes = sorted({device.process_index for device in jax.devices()})
    return [device for process in processes for device in jax.local_devices(process_index=process)[:tp]]


def _is_known(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True
