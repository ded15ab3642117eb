"""fast25_fig12.py --real: this machine's messenger against a plain TCP socket."""

import json
import os
import subprocess
import sys
from pathlib import Path

from absl import flags
from figure import Headline, publish, untargeted
from reference import points as paper_points
from style import line

from mooncake_jax.cluster.launch import OVER_TCP, mpiexec_command

RANKS = Path(__file__).with_name("fast25_fig12_ranks.py")
DEADLINE_S = 600
MIB = 1 << 20
GB = 1e9
SOCKET = "TCP socket"
WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "messenger, shared memory": ("messenger", {}),
    "messenger, MPI over TCP": ("messenger", OVER_TCP),
    SOCKET: ("socket", {}),
}

Points = list[tuple[float, float]]  # bytes, seconds


def measured(values: flags.FlagValues, claim: str) -> int:
    """The exit code."""
    try:
        found = {name: seconds(*way, values.repeats, sizes(values)) for name, way in WAYS.items()}
    except subprocess.SubprocessError as error:  # the ranks have told why
        print(f"experiments/fast25_fig12.py: {error}", file=sys.stderr)
        return 1
    theirs = paper_points("fast25_fig12_4x200gbps")
    rows = [
        {"source": name, "size_gb": nbytes / GB, "seconds": taken}
        for name, points in found.items()
        for nbytes, taken in points
    ]
    gained = {name: found[SOCKET][-1][1] / points[-1][1] for name, points in found.items()}
    expected = dict(theirs["TCP"])[40.0] / dict(theirs["Transfer Engine"])[40.0]
    note = "loopback and shared memory of one machine, where both are copies; the paper's engine has RDMA over NICs"
    headlines = [
        Headline(f"TCP socket over {name}", expected, ratio, untargeted(), "this machine", "none", "predicted", note)
        for name, ratio in gained.items()
        if name != SOCKET
    ]
    headlines += [
        Headline(
            f"{name}, GB/s", None, points[-1][0] / points[-1][1] / GB, untargeted(), "this machine", "none", "predicted"
        )
        for name, points in found.items()
    ]
    return publish(
        values,
        claim=claim,
        rows=rows,
        headlines=headlines,
        lessons=[
            f"On this machine the messenger takes {1 / gained['messenger, shared memory']:.2f} of a socket's time over "
            f"shared memory, and {1 / gained['messenger, MPI over TCP']:.2f} where its MPI uses TCP itself."
        ],
        draw=lambda axes: draw(axes, found, theirs),
    )


def sizes(values: flags.FlagValues) -> list[int]:
    largest = values.largest_mib * MIB
    return [largest // 4, largest] if values.quick else [largest // 2**power for power in range(6, -1, -1)]


def seconds(way: str, environment: dict[str, str], turns: int, nbytes: list[int]) -> Points:
    command = [*mpiexec_command(2), sys.executable, str(RANKS), way, str(turns), *map(str, nbytes)]
    variables = os.environ | environment
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, env=variables, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return [(int(size), taken) for size, taken in found.items()]


def draw(axes, found: dict[str, Points], theirs: dict[str, Points]) -> None:
    """Over the largest size, and over what TCP takes for it: machines differ."""
    for place, (name, points) in enumerate(found.items()):
        line(axes, relative(points, found[SOCKET]), name, place)
    for place, (name, points) in zip((0, 2, 3), theirs.items(), strict=True):
        shown = [point for point in points if point[0] <= theirs["TCP"][-1][0]]
        line(axes, relative(shown, theirs["TCP"]), f"{name}, FAST25", place, paper=True)
    axes.set(xlabel="size / the largest", ylabel="seconds / TCP's for the largest", ylim=(0, 2))
    axes.legend()


def relative(points: Points, tcp: Points) -> Points:
    largest, longest = tcp[-1]
    return [(nbytes / largest, taken / longest) for nbytes, taken in points]
