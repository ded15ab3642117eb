"""Which scripts here are experiments, and what each of them needs: read from their calls of define_flags, so that no
table has to be kept.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Experiment:
    """As define_flags has it: traces: it reads FAST25's; trace: the report's own; real: it can measure this machine."""

    name: str
    traces: bool = False
    trace: bool = False
    real: bool = False


def experiments() -> list[Experiment]:
    """By name."""
    found = (_experiment(file) for file in sorted(FOLDER.glob("*.py")))
    return [experiment for experiment in found if experiment is not None]


def _experiment(file: Path) -> Experiment | None:
    """None for a file that defines no flags of its own name."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "define_flags":
            if node.args and ast.literal_eval(node.args[0]) == file.stem:
                needs = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
                return Experiment(file.stem, *(needs.get(need, False) for need in ("traces", "trace", "real")))
    return None
