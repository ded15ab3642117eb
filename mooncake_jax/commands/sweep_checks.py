"""What a sweep makes sure of before anything runs: that every run is one that `simulate` would take, and that the
folder for the results is empty or holds this very sweep's.
"""

import difflib
import hashlib
import json
import math
from pathlib import Path
from typing import Any

from absl import flags

from mooncake_jax.commands import simulate
from mooncake_jax.commands.sweep_file import Flags, SweepFile
from mooncake_jax.errors import UsageError
from mooncake_jax.simulate.config import SimulationConfig

_OF_ONE_RUN = ("out", "events")  # a sweep has results of its own
_SOUGHT = "speed"
_IN_CONFIG = ("dram_mib", "ssd_mib", "link_gbps")  # flags that SimulationConfig has in other units
# What decides whether the trace can be read, and the costs used: it is done but once for each.
_OF_WORK = (
    "trace",
    "limit",
    "model",
    "cost",
    "believed_cost",
    "prefill",
    "coupled",
    "max_batch",
    "device_kv_tokens",
    "drop_over",
)
_NAME_FILES = ("trace", "cost", "believed_cost")


def check_flags(file: SweepFile, goodput: bool) -> None:
    """Raises UsageError naming the file, and the flag or the combination that simulate refuses."""
    for table, names in (("base", file.base), ("cases", file.cases[0]), ("axes", file.axes)):
        for name in names:
            _check_name(f"{file.path}: {table}.{name}", name, goodput)
    read: set[tuple] = set()
    runs: dict[tuple, Flags] = {}
    for combination in file.combinations():
        try:
            config = simulate.parse([f"--{name}={value}" for name, value in (file.base | combination).items()])
            simulate.check_loadable(config)
            if (used := tuple(simulate.FLAGS[name].value for name in _OF_WORK)) not in read:
                read.add(used)
                simulate.prepare(config)
        except (UsageError, flags.Error) as error:
            at = f" with {_shown(combination)}" if combination else ""
            raise UsageError(f"{file.path}{at}: {error}") from None
        same = runs.setdefault((config, _others(config)), combination)
        if same is not combination:
            raise UsageError(f"{file.path}: {_shown(combination)} is the same run as {_shown(same)}; keep one of them")
        if goodput and config.ttft_slo == config.tbt_slo == math.inf:
            raise UsageError(f"{file.path}: --goodput needs ttft_slo or tbt_slo, which every request meets without")


def _others(config: SimulationConfig) -> str:
    """What flags say beside the configuration that they make."""
    inside = {*config.__dataclass_fields__, *_IN_CONFIG}
    return repr([simulate.FLAGS[name].value for name in simulate.FLAGS if name not in inside])


def _check_name(key: str, name: str, goodput: bool) -> None:
    if name not in simulate.FLAGS:
        near = difflib.get_close_matches(name, list(simulate.FLAGS), 1)
        remedy = f"write {near[0]}" if near else "`mooncake-jax simulate --help` lists them"
        raise UsageError(f"{key}: simulate has no such flag; {remedy}")
    if name in _OF_ONE_RUN:
        raise UsageError(f"{key}: a sweep keeps no files of single runs; remove it")
    if goodput and name == _SOUGHT:
        raise UsageError(f"{key}: --goodput looks for the speed, between lowest and highest of [goodput]; remove it")


def _shown(combination: Flags) -> str:
    return ", ".join(f"{name}={value}" for name, value in combination.items())


def claim_folder(out: Path, file: SweepFile, goodput: bool) -> Path:
    """The folder for files of runs in `out`, which is this sweep's from now on. Raises UsageError."""
    record, runs = out / "sweep.json", out / "runs"
    wanted = json.loads(json.dumps(file.to_json() | {"goodput": _search(file, goodput), "files": _digests(file)}))
    try:
        if record.exists():
            if other := _difference(json.loads(record.read_bytes()), wanted):
                raise UsageError(
                    f"--out={out} holds results of another sweep: {other} is not the same; restore it, or name another "
                    "folder"
                )
        elif out.exists() and any(out.iterdir()):
            raise UsageError(f"--out={out} holds something else; name another folder, or empty it")
        runs.mkdir(parents=True, exist_ok=True)
        for left in runs.glob(".*"):
            left.unlink()
        partial = out / ".sweep.json.partial"
        partial.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")
        partial.replace(record)
    except OSError as error:
        raise UsageError(f"--out={out}: {error.strerror}; name a folder that can be written to") from None
    except (ValueError, AttributeError):
        raise UsageError(f"{record} is damaged; remove --out={out}, or name another folder") from None
    return runs


def _search(file: SweepFile, goodput: bool) -> dict[str, Any] | None:
    return file.to_json()["goodput"] if goodput else None


def _digests(file: SweepFile) -> dict[str, str]:
    """Of the files that runs read."""
    named = [{name: (value,) for name, value in table.items()} for table in (file.base, *file.cases)]
    paths = {Path(value) for table in (*named, file.axes) for name in _NAME_FILES for value in table.get(name, ())}
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(paths) if path.is_file()}


def _difference(recorded: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    """The key of the first thing that is not the same. The order of the axes counts, since it is that of the runs."""
    for name, value in wanted.items():
        other = recorded.get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            keys = [key for key in (*value, *other) if value.get(key) != other.get(key)]
            if keys:
                return f"{name}.{keys[0]}" if name != "files" else keys[0]
            if name == "axes" and list(value) != list(other):
                return "the order of the axes"
        elif value != other:
            return name
    return None
