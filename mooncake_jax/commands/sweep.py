"""mooncake-jax sweep FILE: simulate every combination of flags that a TOML file names, one process a core.

A sweep that was interrupted or killed goes on where it was when started again. With --goodput it finds, for each
combination, how fast the trace may be replayed while enough requests meet their SLO. docs/sweeps.md describes the file.
"""

import os
import signal
import sys
from pathlib import Path

from absl import flags
from rich.console import Console
from rich.table import Column, Table

from mooncake_jax.commands import sweep_goodput, sweep_table
from mooncake_jax.commands.progress import WorkProgress
from mooncake_jax.commands.scheduling_flags import check_out
from mooncake_jax.commands.sweep_checks import check_flags, claim_folder
from mooncake_jax.commands.sweep_file import Flags, SweepFile, read_sweep
from mooncake_jax.commands.sweep_runs import Order, Result, Runs, Search
from mooncake_jax.commands.sweep_table import FIGURES, Row
from mooncake_jax.errors import UsageError

FLAGS = flags.FlagValues()
EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
RUN_COLUMNS = ("status", "reason", *FIGURES)
_END_FIGURES = ("attainment", "requests_per_s", "goodput_requests_per_s")
GOODPUT_COLUMNS = (
    "status",
    "reason",
    "answer",
    *[f"{end}_{name}" for end in ("kept", "failed") for name in ("speed", *_END_FIGURES)],
    "runs",
)
_SHOWN = ("requests_rejected", "ttft_s_p90", "tbt_top10_s_p90", "attainment", "goodput_requests_per_s")
_SHOWN_GOODPUT = ("answer", "kept_speed", "kept_attainment", "kept_requests_per_s", "failed_speed", "failed_attainment")
_MOST_SHOWN = 40
_WIDTH = 120  # where there is no terminal to ask


def _define() -> None:
    kwargs = {"flag_values": FLAGS}
    flags.DEFINE_bool(
        "goodput", False, "find the highest --speed at which enough requests meet their SLO ([goodput])", **kwargs
    )
    flags.DEFINE_integer("jobs", None, "runs at a time (default: one for each core)", **kwargs)
    flags.DEFINE_list("picture", [], "draw these columns of the table as well (needs matplotlib)", **kwargs)
    flags.DEFINE_string("out", None, "folder for the results (default: results/NAME of the file)", **kwargs)


_define()


class Sweep:
    """What has come of it so far. runs: rows of all runs by the number of their combination; ends: of its search."""

    def __init__(self, file: SweepFile):
        self.file = file
        self.runs: dict[int, list[Row]] = {}
        self.ends: dict[int, Row] = {}

    def once(self, number: int, combination: Flags) -> Search:
        """The only run of a combination."""
        result = yield Order(f"{number:05d}", self.file.base | combination)
        self._add(number, combination, result)

    def bisected(self, number: int, combination: Flags) -> Search:
        """The runs that find its goodput."""
        search, rows = sweep_goodput.bisect(self.file.goodput), {}
        speed, ending = next(search), None
        while ending is None:
            at = {"speed": str(speed)}
            result = yield Order(f"{number:05d}-speed{speed}", self.file.base | combination | at)
            rows[speed] = self._add(number, combination | at, result)
            if result.summary is None:
                ending = {"status": "failed", "reason": result.reason}
                break
            try:
                speed = search.send(result.summary["attainment"])
            except StopIteration as found:
                ending = {"status": "done", **_ends(found.value, rows)}
        self.ends[number] = combination | ending | {"runs": len(rows)}

    def _add(self, number: int, combination: Flags, result: Result) -> Row:
        status = "done" if result.summary is not None else "failed"
        row = combination | {"status": status, "reason": result.reason} | sweep_table.figures(result.summary)
        self.runs.setdefault(number, []).append(row)
        return row

    def run_rows(self) -> list[Row]:
        return [row for number in sorted(self.runs) for row in self.runs[number]]

    def end_rows(self) -> list[Row]:
        return [self.ends[number] for number in sorted(self.ends)]


def _ends(bracket: sweep_goodput.Bracket, rows: dict[float, Row]) -> Row:
    found: Row = {"answer": bracket.answer}
    for end, speed in (("kept", bracket.kept), ("failed", bracket.failed)):
        if speed is not None:
            found |= {f"{end}_speed": speed, **{f"{end}_{name}": rows[speed][name] for name in _END_FIGURES}}
    return found


def main(arguments: list[str]) -> int:
    """SIGTERM interrupts it as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _main(arguments)
    finally:
        signal.signal(signal.SIGTERM, before)


def _main(arguments: list[str]) -> int:
    files = FLAGS(["sweep", *arguments])[1:]
    if len(files) != 1:
        raise UsageError(f"sweep {' '.join(files)}: name one TOML file; docs/sweeps.md describes it")
    jobs = FLAGS.jobs if FLAGS.jobs is not None else _cores()
    if jobs < 1:
        raise UsageError(f"--jobs={jobs}: it must be at least 1")
    check_out(FLAGS)
    file = read_sweep(Path(files[0]))
    sweep_table.check_picture(FLAGS.picture, GOODPUT_COLUMNS[3:] if FLAGS.goodput else FIGURES)
    check_flags(file, FLAGS.goodput)
    out = Path(FLAGS.out) if FLAGS.out else Path("results") / file.path.stem
    runs = claim_folder(out, file, FLAGS.goodput)
    sweep = Sweep(file)
    interrupted = _run(sweep, runs, jobs)
    _write(sweep, out)
    if interrupted:
        print(f"mooncake-jax sweep: interrupted; start it again to go on: what is done is in {out}", file=sys.stderr)
        return EXIT_INTERRUPTED
    return _tell(sweep, out)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run(sweep: Sweep, folder: Path, jobs: int) -> bool:
    """Whether it was interrupted."""
    make = sweep.bisected if FLAGS.goodput else sweep.once
    most = sweep_goodput.most_tries(sweep.file.goodput) if FLAGS.goodput else 1
    searches = [(make(number, combination), most) for number, combination in enumerate(sweep.file.combinations())]
    try:
        with WorkProgress("sweeping", "done") as progress:
            Runs(folder, jobs, progress.update).run(searches)
    except KeyboardInterrupt:
        return True
    except OSError as error:
        raise UsageError(f"--out={folder.parent}: {error.strerror}; make room and start the sweep again") from None
    return False


def _write(sweep: Sweep, out: Path) -> None:
    columns = sweep.file.columns
    tried = (*columns, "speed") if FLAGS.goodput else columns
    try:
        sweep_table.write_csv(out / "sweep.csv", (*tried, *RUN_COLUMNS), sweep.run_rows())
        if FLAGS.goodput:
            sweep_table.write_csv(out / "goodput.csv", (*columns, *GOODPUT_COLUMNS), sweep.end_rows())
    except OSError as error:
        raise UsageError(f"--out={out}: {error.strerror}; make room and start the sweep again") from None


def _tell(sweep: Sweep, out: Path) -> int:
    """On the terminal, and as a picture. Returns the exit code."""
    rows = sweep.end_rows() if FLAGS.goodput else sweep.run_rows()
    _print(sweep.file.columns, _SHOWN_GOODPUT if FLAGS.goodput else _SHOWN, rows)
    if FLAGS.picture:
        sweep_table.draw(out / "sweep.png", FLAGS.picture, sweep.file.columns, rows)
    failed = [row for row in rows if row["status"] != "done"]
    for row in failed[:1]:
        print(f"{len(failed)} of {len(rows)} failed; the first: {row['reason']}", file=sys.stderr)
    print(f"results are in {out / ('goodput.csv' if FLAGS.goodput else 'sweep.csv')}")
    return EXIT_FAILED if failed else 0


def _print(columns: tuple[str, ...], shown: tuple[str, ...], rows: list[Row]) -> None:
    table = Table(*[Column(name, overflow="fold") for name in (*columns, *shown)], box=None, pad_edge=False)
    for row in rows[:_MOST_SHOWN]:
        table.add_row(*[_shown(row.get(name)) for name in (*columns, *shown)])
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=_WIDTH)
    console.print(table)
    if len(rows) > _MOST_SHOWN:
        console.print(f"and {len(rows) - _MOST_SHOWN} more")


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
