"""The frame that all figures share: their flags, and what each of them leaves behind.

FLAGS = define_flags("fast25_fig08", traces=True)

def main(arguments):
    parse(FLAGS, arguments)
    ...
    return publish(FLAGS, claim="...", rows=[...], headlines=[Headline(...)], draw=draw)

if __name__ == "__main__":
    run_script(main)
"""

import csv
import json
import platform
import shlex
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from absl import flags
from headline import Headline, Sensitivity, at_least, at_most, between, points, same, share, untargeted
from pictures import save_pictures
from rich.console import Console
from rich.table import Table
from rich.text import Text
from script import make_folder, run_script
from script import parse as parse_flags
from sources import digests

from mooncake_jax.errors import UsageError

__all__ = [
    "Headline",
    "Sensitivity",
    "at_least",
    "at_most",
    "between",
    "define_flags",
    "parse",
    "points",
    "publish",
    "run_script",
    "same",
    "seeds_of",
    "share",
    "untargeted",
]

_VERDICTS = {True: "ok", False: "MISS", None: "-"}


def define_flags(
    name: str, *, traces: bool = False, trace: bool = False, seeds: int = 0, real: bool = False
) -> flags.FlagValues:
    """Those of a figure, more of which it may define itself; --out and --quick always.

    traces: it reads FAST25's traces (--traces); trace: it reads the report's own (--trace); seeds: so many at first,
    for what it generates (--seeds); real: it can measure this machine as well (--real).
    """
    values = flags.FlagValues()
    kwargs = {"flag_values": values}
    flags.DEFINE_string("out", f"results/{name}", "folder for the results", **kwargs)
    flags.DEFINE_bool("quick", False, "few requests, to see that it runs: no verdicts", **kwargs)
    if traces:
        flags.DEFINE_string("traces", "traces", "folder of FAST25's traces (mooncake-jax trace get)", **kwargs)
    if trace:
        flags.DEFINE_string("trace", None, "the report's own trace (default: a surrogate is generated)", **kwargs)
    if seeds:
        flags.DEFINE_list("seeds", [str(seed) for seed in range(seeds)], "seeds of what is generated", **kwargs)
    if real:
        flags.DEFINE_bool("real", False, "measure this machine, instead of simulating the paper's", **kwargs)
    return values


def parse(values: flags.FlagValues, arguments: list[str]) -> None:
    """As script.parse; an --out that cannot be written to is told before anything is computed. Raises UsageError."""
    parse_flags(values, arguments)
    if "seeds" in values:
        seeds_of(values)
    make_folder(_folder(values))


def seeds_of(values: flags.FlagValues) -> tuple[int, ...]:
    """Those of --seeds; the first alone with --quick. Raises UsageError."""
    if not values.seeds or not all(seed.isdecimal() for seed in values.seeds):
        raise UsageError(f"--seeds={','.join(values.seeds)}: name integers from 0 on, with commas between")
    if len(set(map(int, values.seeds))) < len(values.seeds):
        raise UsageError(f"--seeds={','.join(values.seeds)}: each seed counts once; name different ones")
    return tuple(map(int, values.seeds[:1] if values.quick else values.seeds))


def publish(
    values: flags.FlagValues,
    *,
    claim: str,
    rows: Sequence[Mapping[str, Any]],
    headlines: Sequence[Headline],
    draw: Callable[..., None],
    panels: tuple[int, int] = (1, 1),
    size: tuple[float, float] = (6.4, 4.0),
    sensitivities: Sequence[Sensitivity] = (),
    lessons: Sequence[str] = (),
) -> int:
    """Write <name>.csv, .json, .png and .svg into --out, and print the headlines; the exit code, 0: a miss is a result.

    claim: what the paper's figure shows, a sentence; rows: all that was computed, tidy: a number each, with columns
    that say what it is; draw: puts ours and the paper's points (style.py) into the axes that it is given, panels[0]
    rows of panels[1], on `size` inches; lessons: what one learns, a sentence each.
    """
    script, name, out = _script(values), _name(values), Path(_folder(values))
    arguments = arguments_of(values)
    command = shlex.join(["python", f"experiments/{script}.py", *arguments])
    measured = _measured(values)
    seeds = list(seeds_of(values)) if "seeds" in values and not measured else []
    _write_csv(out / f"{name}.csv", rows)
    found = [headline.row(name) | ({"ok": None} if values.quick else {}) for headline in headlines]
    about = {"name": name, "claim": claim, "command": command, "arguments": arguments}
    about |= {"quick": values.quick, "seeds": seeds}
    about |= {"versions": {"mooncake-jax": version("mooncake-jax"), "python": platform.python_version()}}
    results = {"headlines": found, "sensitivities": [one.row() for one in sensitivities], "lessons": list(lessons)}
    print_headlines(found)
    metadata = {"Title": f"{name}: {claim}", "Description": f"{command}; seeds {seeds}"}
    told = save_pictures(out, name, draw, panels, size, metadata)
    # Last of all: where there is a JSON, the others are whole.
    about |= results | {"sources": digests(script, measured)}
    text = json.dumps(about, indent=1, allow_nan=False)
    partial = out / f".{name}.json"
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(out / f"{name}.json")
    print(f"results are in {out}{told}{', of a quick run: no verdicts' if values.quick else ''}")
    return 0


def arguments_of(values: flags.FlagValues) -> list[str]:
    """Those that were given, but for --out: where results go changes none of them."""
    given = [values[flag] for flag in values if flag != "out" and values[flag].present]
    return sorted(text for flag in given if (text := flag.serialize()))


def _script(values: flags.FlagValues) -> str:
    return Path(values["out"].default).name


def _name(values: flags.FlagValues) -> str:
    """Of what it leaves behind: what was measured lies beside what was simulated."""
    return f"{_script(values)}_real" if _measured(values) else _script(values)


def _measured(values: flags.FlagValues) -> bool:
    return "real" in values and values.real


def _folder(values: flags.FlagValues) -> str:
    return values.out if values["out"].present else str(Path(values.out).with_name(_name(values)))


def print_headlines(rows: Sequence[Mapping[str, Any]]) -> None:
    columns = ("what", "paper", "ours", "ratio", "tolerance", "verdict", "kind", "profile", "trace")
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        figures = [row["name"], shown(row["paper"]), shown(row["ours"]), shown(row["ratio"]), row["tolerance"]]
        rest = [_VERDICTS[row["ok"]], row["kind"], row["profile"], row["trace"]]
        table.add_row(*(Text(cell) for cell in figures + rest))
    Console(highlight=False, width=None if Console().is_terminal else 160).print(table)


def shown(value: Any) -> str:
    """Four digits of a number, or all before its point; a dash for none."""
    if value is None:
        return "-"
    return digits(value, 4) if isinstance(value, float) else str(value)


def digits(value: float, least: int) -> str:
    """So many digits, or all before the point: large numbers are not written as powers of ten."""
    return f"{value:.0f}" if abs(value) >= 10**least else f"{value:.{least}g}"


def _write_csv(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """With a column for each field that any row has."""
    with file.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, list(dict.fromkeys(name for row in rows for name in row)), restval="")
        writer.writeheader()
        writer.writerows(rows)
