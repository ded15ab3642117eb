"""Each floor imports only floors below it (docs/architecture.md), and __init__ files hold no logic."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "mooncake_jax"
FLOORS = {
    "errors": 0, "field_types": 0, "records": 0, "request": 0, "metrics": 0, "workload": 0,
    "model": 1, "cache": 1,
    "parallel": 2, "sched": 2,
    "simulate": 3, "cluster": 3,
    "report": 4, "commands": 4, "__main__": 4,
}  # fmt: skip
FORBIDDEN = {
    "request": {"jax", "flax", "mpi4py", "numpy"},
    "metrics": {"jax", "flax", "mpi4py", "numpy"},
    "workload": {"jax", "flax", "mpi4py", "tokenizers"},
    "model": {"mpi4py"},
    "sched": {"jax", "flax", "mpi4py", "time", "threading", "random"},
    "cache": {"jax", "flax"},
    "simulate": {"jax", "flax", "mpi4py", "numpy", "time", "threading", "random"},
}


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part != "__init__":
            yield path, part


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_import_climbs():
    for path, part in modules():
        for name in imports(path):
            if name.startswith("mooncake_jax."):
                other = name.split(".")[1]
                assert FLOORS[other] <= FLOORS[part], f"{path} imports {name}, which is on a higher floor"


def test_parts_that_must_not_know_something_do_not_import_it():
    for path, part in modules():
        found = {name.split(".")[0] for name in imports(path)} & FORBIDDEN.get(part, set())
        assert not found, f"{path} imports {found}"


def test_cache_and_model_do_not_know_each_other_nor_the_schedulers():
    for path, part in modules():
        others = {name.split(".")[1] for name in imports(path) if name.startswith("mooncake_jax.")}
        if part in ("cache", "model"):
            assert not others & ({"cache", "model", "sched"} - {part}), f"{path} imports {others}"


def test_init_files_are_empty_of_logic():
    for path in PACKAGE.rglob("__init__.py"):
        body = ast.parse(path.read_text()).body
        assert all(isinstance(node, ast.Expr) for node in body), f"{path} holds more than a docstring"
