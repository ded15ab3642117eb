"""All figures, each a process of its own, and one page of what came of them.

    python experiments/run_all.py [--traces=DIR] [--trace=FILE] [--out=results] [--jobs=2] [--quick]
                                  [--only=a,b] [--target=simulated|real]

An experiment is a script here that calls define_flags with its own name. Its results go to <out>/<name>, the page to
<out>/index.html, the fidelity table to <out>/fidelity.json. A figure that is there already is not made again if it was
made by the same arguments and the same code: its JSON has a digest of every file that its process had loaded. One that
fails does not stop the others: it is named in the end, with what it said last, and the exit code is 1. Those that
measure this machine run one after another.
"""

import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from absl import flags
from listing import FOLDER, Experiment, experiments
from page import write_page
from script import make_folder, parse, run_script
from sources import PROJECT, unchanged

from mooncake_jax.commands.plots import can_plot
from mooncake_jax.commands.progress import WorkProgress
from mooncake_jax.errors import UsageError
from mooncake_jax.workload.released import RELEASED

FLAGS = flags.FlagValues()
_LOOK_S = 0.1  # between two looks at what has ended
_QUICK_S = 5.0  # that a quick run takes, about
_END_S = 5.0  # for a process to end once asked to


def _define() -> None:
    kwargs = {"flag_values": FLAGS}
    flags.DEFINE_string("traces", "traces", "folder of FAST25's traces (mooncake-jax trace get)", **kwargs)
    flags.DEFINE_string("trace", None, "the report's own trace (default: a surrogate is generated)", **kwargs)
    flags.DEFINE_string("out", "results", "folder for the results", **kwargs)
    flags.DEFINE_integer("jobs", 2, "processes at a time", lower_bound=1, **kwargs)
    flags.DEFINE_bool("quick", False, "few requests, to see that all run: no verdicts", **kwargs)
    flags.DEFINE_list("only", [], "these alone, by their names (default: all)", **kwargs)
    flags.DEFINE_enum("target", "simulated", ["simulated", "real"], "real: those that measure this machine", **kwargs)


_define()


@dataclass(frozen=True)
class Job:
    """A figure to make. arguments: all but --out."""

    experiment: Experiment
    name: str
    arguments: list[str]
    folder: Path

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    @property
    def seconds(self) -> float:
        """About what it takes alone: of --quick ones all the same, of others what their headers say."""
        told = self.experiment.real_seconds if "--real" in self.arguments else self.experiment.seconds
        return _QUICK_S if "--quick" in self.arguments or told is None else told

    def is_done(self) -> bool:
        """Whether its JSON was made by the same arguments and code, and no picture is missing that can be drawn."""
        try:
            about = json.loads((self.folder / f"{self.name}.json").read_text(encoding="utf-8"))
            same = about["arguments"] == self.arguments and unchanged(about["sources"])
            return same and (not can_plot() or (self.folder / f"{self.name}.png").is_file())
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return False

    def start(self) -> "Running":
        file = self.folder / f"{self.name}.json"
        if file.is_file():
            file.unlink()  # what is not made by this code is not to be shown if it fails
        script = str(FOLDER / f"{self.experiment.name}.py")
        command = [sys.executable, script, *self.arguments, f"--out={self.folder}"]
        path = os.pathsep.join(filter(None, (str(PROJECT), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"PYTHONPATH": path}  # the package that stands beside these scripts
        with self.log.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        return Running(self, process, time.monotonic())

    def last_line(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


@dataclass(frozen=True)
class Running:
    job: Job
    process: subprocess.Popen
    begun: float

    def spent(self) -> float:
        """Seconds since it began, less than it may take."""
        return min(time.monotonic() - self.begun, 0.95 * self.job.seconds)


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    wanted, most = chosen(), at_once()
    check_traces(wanted)
    out = make_folder(FLAGS.out)
    jobs = [make_job(experiment, out) for experiment in wanted]
    waiting = [job for job in jobs if not job.is_done()]
    print(f"{len(jobs)} figures, {len(jobs) - len(waiting)} of them made before", flush=True)
    failed = run(waiting, most)
    rows = write_page(out, [job.name for job in failed])
    missed = sum(row["ok"] is False for row in rows)
    print(f"{len(rows)} headline numbers, {missed} of them beyond their tolerance: {out / 'index.html'}")
    for job in failed:
        print(f"experiments/run_all.py: {job.name} failed: {job.last_line()} (all of it: {job.log})", file=sys.stderr)
    return 1 if failed else 0


def chosen() -> list[Experiment]:
    """Those of --only and --target. Raises UsageError."""
    real = FLAGS.target == "real"
    known = {one.name: one for one in experiments() if one.real or not real}
    for name in FLAGS.only:
        if name not in known:
            raise UsageError(
                f"--only={name}: --target={FLAGS.target} has no such figure; use some of {', '.join(known)}"
            )
    return [known[name] for name in FLAGS.only or known]


def at_once() -> int:
    """As --jobs says; one where this machine is measured. Raises UsageError."""
    if FLAGS.target == "simulated":
        return FLAGS.jobs
    if FLAGS["jobs"].present and FLAGS.jobs > 1:
        raise UsageError(f"--jobs={FLAGS.jobs}: --target=real measures this machine, figure by figure; leave it out")
    return 1


def check_traces(wanted: Sequence[Experiment]) -> None:
    """Raises UsageError where none is there that these need; one that is missing alone fails its figures."""
    if FLAGS.target == "real":
        return
    files = [Path(FLAGS.traces) / RELEASED[name].file_name for name in ("conversation", "synthetic", "toolagent")]
    if any(one.traces for one in wanted) and not any(map(Path.is_file, files)):
        raise UsageError(
            f"--traces={FLAGS.traces}: FAST25's traces are not there; `mooncake-jax trace get conversation synthetic "
            f"toolagent --dir={FLAGS.traces}` brings them"
        )
    if FLAGS.trace is not None and not Path(FLAGS.trace).is_file():
        raise UsageError(f"--trace={FLAGS.trace}: there is no such file; leave it out, and a surrogate is generated")


def make_job(experiment: Experiment, out: Path) -> Job:
    """Flags that an experiment does not have are not given to it."""
    real = FLAGS.target == "real"
    arguments = ["--quick"] if FLAGS.quick else []
    if experiment.traces and not real:
        arguments.append(f"--traces={FLAGS.traces}")
    if experiment.trace and FLAGS.trace is not None and not real:
        arguments.append(f"--trace={FLAGS.trace}")
    if real:
        arguments.append("--real")
    name = f"{experiment.name}_real" if real else experiment.name
    return Job(experiment, name, sorted(arguments), out / name)


def run(jobs: Sequence[Job], most: int) -> list[Job]:
    """Those that failed. Whatever interrupts it ends the processes."""
    waiting, running, failed, ended_s = deque(jobs), [], [], 0.0
    total_s = sum(job.seconds for job in jobs)
    try:
        with WorkProgress("running", "run") as progress:
            while waiting or running:
                while waiting and len(running) < most:
                    running.append(waiting.popleft().start())
                time.sleep(_LOOK_S)
                for one in [one for one in running if one.process.poll() is not None]:
                    running.remove(one)
                    ended_s += one.job.seconds
                    tell(one)
                    if one.process.returncode != 0:
                        failed.append(one.job)
                progress.update(ended_s + sum(map(Running.spent, running)), total_s)
    finally:
        stop(running)
    return failed


def tell(ended: Running) -> None:
    seconds, code = time.monotonic() - ended.begun, ended.process.returncode
    print(f"{ended.job.name}: {seconds:.0f} s{f', exit code {code}' if code else ''}", file=sys.stderr)


def stop(running: Sequence[Running]) -> None:
    for one in running:
        one.process.terminate()
    for one in running:
        try:
            one.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()


if __name__ == "__main__":
    run_script(main)
