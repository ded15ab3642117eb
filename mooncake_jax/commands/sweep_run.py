"""One run of a sweep, a process of its own: `python -m mooncake_jax.commands.sweep_run FILE --flags of simulate`.

FILE appears whole, with the run's summary or the reason why it failed, or not at all. The process ends when its
standard input does: the sweep holds the other end, and may be killed.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from mooncake_jax.commands import simulate
from mooncake_jax.simulate.run import Stuck


def main(path: Path, arguments: list[str]) -> None:
    try:
        simulation = simulate.prepare(simulate.parse(arguments))
        ending = {"reason": None, "summary": simulate.summarise(simulation, simulate.run_simulation(simulation))}
    except Stuck as error:
        ending = failed(str(error))
    except Exception as error:  # of a user's policy, perhaps: the other runs go on
        ending = failed(f"{type(error).__name__}: {' '.join(str(error).split())}")
    write_result(path, ending)


def failed(reason: str) -> dict[str, Any]:
    return {"reason": reason, "summary": None}


def write_result(path: Path, value: dict[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")  # a killed sweep's run may still be writing its own
    partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def _end_with_sweep() -> None:
    while os.read(0, 1):  # not by sys.stdin, whose lock the interpreter wants when it ends
        pass
    os._exit(130)


if __name__ == "__main__":
    threading.Thread(target=_end_with_sweep, daemon=True).start()
    try:
        main(Path(sys.argv[1]), sys.argv[2:])
    except KeyboardInterrupt:  # its sweep says so
        sys.exit(130)
