"""Which scripts here are experiments, and what each of them needs: read from their calls of define_flags, so that no
table has to be kept.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
_TIME = re.compile(r"\b([\d.]+|half an?|an?) (s|seconds?|minutes?)\b( and a half)?")  # as headers say it


@dataclass(frozen=True)
class Experiment:
    """As define_flags has it: traces: it reads FAST25's; trace: the report's own; real: it can measure this machine.
    seconds, real_seconds: what it takes alone, and with --real, as the header names it; None where it does not.
    """

    name: str
    traces: bool = False
    trace: bool = False
    real: bool = False
    seconds: float | None = None
    real_seconds: float | None = None


def experiments() -> list[Experiment]:
    """By name."""
    found = (_experiment(file) for file in sorted(FOLDER.glob("*.py")))
    return [experiment for experiment in found if experiment is not None]


def _experiment(file: Path) -> Experiment | None:
    """None for a file that defines no flags of its own name."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "define_flags":
            if node.args and ast.literal_eval(node.args[0]) == file.stem:
                needs = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
                flags = (needs.get(need, False) for need in ("traces", "trace", "real"))
                return Experiment(file.stem, *flags, *_seconds(file.stem, ast.get_docstring(tree) or ""))
    return None


def _seconds(name: str, header: str) -> tuple[float | None, float | None]:
    """What the first command of the header takes, and the first one with --real."""
    commands = [line for line in header.splitlines() if f"python experiments/{name}.py" in line]
    simulated = [_in_seconds(line) for line in commands if "--real" not in line]
    real = [_in_seconds(line) for line in commands if "--real" in line]
    return next(iter(simulated), None), next(iter(real), None)


def _in_seconds(line: str) -> float | None:
    found = _TIME.search(line)
    if found is None:
        return None
    number = {"a": 1.0, "an": 1.0, "half a": 0.5, "half an": 0.5}.get(found[1]) or float(found[1])
    return (number + (0.5 if found[3] else 0.0)) * (60.0 if found[2].startswith("min") else 1.0)
