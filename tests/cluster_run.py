"""Test harness: runs of `mooncake-jax replay` on real MPI ranks."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from mooncake_jax.cluster.launch import mpiexec_command
from mooncake_jax.cluster.verify import verify

TINY = f"--model={Path(__file__).parent / 'data' / 'tiny-llama2'}"
needs_ulfm = pytest.mark.skipif(
    "ulfm" not in mpiexec_command(1), reason="only Open MPI with ULFM lets the other ranks live on"
)
DEADLINE_S = 300
REPLAY = [sys.executable, "-m", "mooncake_jax", "replay"]


@dataclass
class Run:
    code: int
    stdout: str
    stderr: str
    out: Path

    def rows(self):
        return {row["id"]: row for row in map(json.loads, (self.out / "requests.jsonl").open())}

    def events(self):
        return [json.loads(line) for line in (self.out / "events.jsonl").open()]

    def messages(self, kind):
        return [e["message"] for e in self.events() if e["message"]["type"] == kind]

    def summary(self):
        return json.loads((self.out / "summary.json").read_text())


def start(out, *flags, command=REPLAY):
    arguments = [*command, *flags, f"--out={out}"]
    return subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish(process, out):
    try:
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    return Run(process.returncode, stdout, stderr, Path(out))


def replay(out, *flags, command=REPLAY):
    """Run to the end; asserts that no rank and no shared memory is left."""
    process = start(out, *flags, command=command)
    run = finish(process, out)
    assert not ranks(out), "ranks are left"
    assert not left_behind(process), "files or shared memory are left"
    return run


def left_behind(launcher):
    """What lies in the folders that this launcher gave to its ranks."""
    name = f"mooncake_jax-{launcher.pid}-*"
    return [path for folder in ("/dev/shm", tempfile.gettempdir()) for path in Path(folder).glob(name)]


def ranks(out):
    """MPI rank -> pid of the processes of the run that writes to `out`."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"--out={out}".encode() in command:
            for variable in environment:
                if variable.startswith(b"OMPI_COMM_WORLD_RANK="):
                    found[int(variable.split(b"=")[1])] = int(entry.name)
    return found


def wait_for(process, path, condition):
    """Wait until the text of a file of a running run meets a condition."""
    deadline = time.monotonic() + DEADLINE_S
    while not (path.exists() and condition(path.read_text())):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "deadline"
        time.sleep(0.05)


def wait_for_rows(process, out, count):
    """Wait until this many requests have ended."""
    wait_for(process, Path(out) / "requests.jsonl", lambda text: len(text.splitlines()) >= count)


def wait_for_message(process, out, kind):
    """Wait until Conductor has handled a message of this kind."""
    wait_for(process, Path(out) / "events.jsonl", lambda text: f'"type":"{kind}"' in text)


def kill(pid, signum=signal.SIGKILL):
    os.kill(pid, signum)


def prompt(name, length, seed=0, **fields):
    """A line of a prompts file for TINY."""
    rng = random.Random(seed)
    return {"id": name, "prompt_ids": [rng.randrange(320) for _ in range(length)], "max_tokens": 6, **fields}


def write_prompts(path, prompts):
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return path


def replayed_differences(run, actors):
    """Events whose actions differ when fresh actors handle the recorded messages again."""
    return list(verify(run.out / "events.jsonl", actors).differences)
