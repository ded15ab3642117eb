"""Two hosts made of one machine: network namespaces joined by a virtual cable, whose rate can be limited (tc tbf) and
whose bytes are counted. For whatever needs to see hosts apart: benchmarks/pipeline.py, and the test of a launch.

Each host has a name of its own that both know. They share files, memory and cores. Needs root on Linux; why_not() says
what is missing.
"""

import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

NETWORK = "10.213.77"
_COMMAND_DEADLINE_S = 30
_BURST_S = 4e-3  # what tbf lets through at once: a turn of the kernel's clock, or it would not reach its rate

# $1: host, $2: the file of names; then the command.
_ENTER = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'


class Hosts:
    """Enter it as a context; on leaving, hosts and cable are gone."""

    def __init__(self):
        self.names = tuple(f"mj{os.getpid()}{end}" for end in "ab")
        self._folder = tempfile.TemporaryDirectory(prefix="mooncake_jax-hosts-")
        self._known = Path(self._folder.name) / "hosts"
        self.agent = Path(self._folder.name) / "agent"

    def __enter__(self) -> "Hosts":
        one, other = self.names
        try:
            for name in self.names:
                _run("ip", "netns", "add", name)
            _run("ip", "link", "add", "cable", "netns", one, "type", "veth", "peer", "name", "cable", "netns", other)
            for place, name in enumerate(self.names, 1):
                _run("ip", "-n", name, "addr", "add", f"{NETWORK}.{place}/24", "dev", "cable")
                for device in ("lo", "cable"):
                    _run("ip", "-n", name, "link", "set", device, "up")
        except BaseException:
            self.__exit__()
            raise
        lines = [f"{NETWORK}.{place} {name}\n" for place, name in enumerate(self.names, 1)]
        self._known.write_text("".join(["127.0.0.1 localhost\n", *lines]))
        self._write_agent()
        return self

    def _write_agent(self) -> None:
        """What mpiexec calls in the place of ssh: with a host, then a command line for its shell."""
        choices = [f'{name}) exec {shlex.join(self.command(name, ["sh", "-c"]))} "$*" ;;\n' for name in self.names]
        self.agent.write_text("#!/bin/sh\nhost=$1; shift\ncase $host in\n" + "".join(choices) + "esac\n")
        self.agent.chmod(0o700)

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=_COMMAND_DEADLINE_S, check=False)
        self._folder.cleanup()

    def command(self, host: str, arguments: Sequence[str]) -> list[str]:
        """The command line that runs these arguments on a host."""
        enter = ["unshare", "--uts", "--mount", "sh", "-c", _ENTER, "sh", host, str(self._known)]
        return ["ip", "netns", "exec", host, *enter, *arguments]

    def limit(self, gbps: float) -> None:
        """From now on the cable carries at most so much in each direction."""
        burst = max(int(gbps * 1e9 / 8 * _BURST_S), 1 << 17)
        for name in self.names:
            rate = f"{int(gbps * 1000)}mbit"
            limit = ["tbf", "rate", rate, "burst", str(burst), "latency", "100ms"]
            _run("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", "cable", "root", *limit)

    def sent(self) -> int:
        """Bytes that the hosts have sent one another so far, headers included."""
        count = "/sys/class/net/cable/statistics/tx_bytes"
        return sum(int(_run("ip", "netns", "exec", name, "cat", count)) for name in self.names)


def why_not() -> str | None:
    """Why this machine does not let us have hosts, None if it does."""
    try:
        with Hosts() as hosts:
            _run(*hosts.command(hosts.names[0], ["true"]))
            hosts.limit(1)
    except FileNotFoundError as error:
        return f"there is no command {error.filename!r} here"
    except RuntimeError as error:
        return str(error)
    return None


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_DEADLINE_S, check=False)
    if done.returncode:
        problem = " ".join(done.stderr.split())
        raise RuntimeError(f"network namespaces are not permitted: {' '.join(command[:4])}: {problem}")
    return done.stdout
