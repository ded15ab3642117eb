"""mooncake-jax sweep: its tables, and what is left when it is killed, interrupted, or its runs fail."""

import csv
import json
import os
import signal
import subprocess
import time

import pytest
from sweeps import REQUESTS, command, sweep, write_sweep

from mooncake_jax.__main__ import run
from mooncake_jax.commands.sweep_table import draw

GRID = '[axes]\npolicy = ["random", "kvcache-centric"]\nspeed = [1, 20]'


def rows(out, name="sweep.csv"):
    with (out / name).open() as file:
        return list(csv.DictReader(file))


def test_two_jobs_equal_one_job_byte_for_byte_and_rows_are_what_simulate_says(tmp_path):
    path = write_sweep(tmp_path, GRID, "ttft_slo = 5\ntbt_slo = 0.1")
    for jobs in (1, 2):
        code, printed, errors = sweep(path, f"--jobs={jobs}", f"--out={tmp_path / str(jobs)}")
        assert (code, errors) == (0, ""), errors
        assert f"results are in {tmp_path / str(jobs) / 'sweep.csv'}" in printed
    assert (tmp_path / "1" / "sweep.csv").read_bytes() == (tmp_path / "2" / "sweep.csv").read_bytes()
    found = rows(tmp_path / "1")
    assert [(row["policy"], row["speed"]) for row in found] == [
        (policy, speed) for policy in ("random", "kvcache-centric") for speed in ("1", "20")
    ]
    assert list(found[0])[:5] == ["policy", "speed", "status", "reason", "duration_s"]
    alone = ["--prefill=1", "--decode=1", "--admission=none", "--ttft_slo=5", "--tbt_slo=0.1", "--cost=fast25"]
    trace = f"--trace={tmp_path / 'trace.jsonl'}"
    assert run(["simulate", trace, *alone, "--policy=random", "--speed=20", f"--out={tmp_path / 'alone'}"]) == 0
    summary = json.loads((tmp_path / "alone" / "summary.json").read_text())
    assert found[1]["ttft_s_p90"] == repr(summary["ttft_s"]["p90"])
    assert found[1]["attainment"] == repr(summary["attainment"]) and found[1]["requests_completed"] == str(REQUESTS)
    assert float(found[1]["requests_per_s"]) == pytest.approx(10)


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_sweep_that_is_stopped_goes_on_where_it_was(tmp_path, ending):
    path, out = write_sweep(tmp_path, GRID), tmp_path / "out"
    stopped = subprocess.Popen(command(path, "--jobs=1", f"--out={out}"), stderr=subprocess.PIPE, text=True)
    first = out / "runs" / "00000.json"
    deadline = time.monotonic() + 60
    while not first.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(stopped.pid, ending)
    errors = stopped.communicate(timeout=60)[1]
    done = sorted((out / "runs").glob("*.json"))
    assert first in done and all(json.loads(file.read_text())["summary"] for file in done)
    if ending != signal.SIGKILL:
        assert stopped.returncode == 130 and errors.count("\n") == 1
        assert f"interrupted; start it again to go on: what is done is in {out}" in errors
        assert len(rows(out)) == len(done)
    written = first.stat().st_mtime_ns
    code, _, errors = sweep(path, "--jobs=2", f"--out={out}")
    assert (code, errors) == (0, "") and first.stat().st_mtime_ns == written
    assert [row["status"] for row in rows(out)] == ["done"] * 4
    assert not list((out / "runs").glob(".*"))


SLOW = """
import os, pathlib, time
from mooncake_jax.sched.policies import RoundRobin

class Waiting(RoundRobin):
    def choose(self, request, view, now):
        pathlib.Path(os.environ["WAITING"]).write_text(str(os.getpid()))
        time.sleep(600)
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_runs_end_with_their_sweep(tmp_path, monkeypatch, ending):
    (tmp_path / "own_waiting.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    monkeypatch.setenv("WAITING", str(tmp_path / "waiting"))
    path = write_sweep(tmp_path, base='policy = "own_waiting:Waiting"')
    stopped = subprocess.Popen(command(path, f"--out={tmp_path / 'out'}"), stderr=subprocess.DEVNULL)
    child = wait_for(lambda: int((tmp_path / "waiting").read_text()))
    os.kill(stopped.pid, ending)
    stopped.wait(60)
    try:
        wait_for(lambda: not is_running(child) or None)
    finally:
        if is_running(child):
            os.kill(child, signal.SIGKILL)


def wait_for(find):
    """What it finds, within a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if (found := find()) is not None:
                return found
        except (OSError, ValueError):
            pass
        time.sleep(0.02)
    raise TimeoutError


def is_running(process):
    """An orphan that nobody waits for stays, dead, where init does not reap."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True, check=False)
    return bool(state.stdout.strip()) and not state.stdout.startswith("Z")


def test_a_run_of_another_version_of_the_code_is_run_again(tmp_path):
    path, out = write_sweep(tmp_path, "[axes]\nspeed = [1, 2]", "limit = 2"), tmp_path / "out"
    assert sweep(path, f"--out={out}")[0] == 0
    before = rows(out)
    for place, text in enumerate(['{"reason": null, "summary": {}}', '{"reason": null, "summary": null}']):
        (out / "runs" / f"0000{place}.json").write_text(text)
    code, _, errors = sweep(path, f"--out={out}")
    assert (code, errors) == (0, "") and rows(out) == before


OWN = """
import os, signal, sys
from mooncake_jax.sched.policies import RoundRobin

class Dying(RoundRobin):
    def choose(self, request, view, now):
        os.kill(os.getpid(), signal.SIGKILL)

class Exiting(RoundRobin):
    def choose(self, request, view, now):
        print("out of luck", file=sys.stderr, flush=True)
        os._exit(1)
"""


def test_failed_runs_are_rows_with_their_reason_and_run_again(tmp_path, monkeypatch):
    (tmp_path / "own_swept.py").write_text(OWN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    tables = '[axes]\npolicy = ["own_swept:Dying", "random", "own_swept:Exiting"]'
    path, out = write_sweep(tmp_path, tables, "limit = 2"), tmp_path / "out"
    code, _, errors = sweep(path, f"--out={out}")
    assert code == 1 and errors == "2 of 3 failed; the first: killed by signal 9\n"
    reasons = ["killed by signal 9", "", "ended with exit code 1: out of luck"]
    assert [row["reason"] for row in rows(out)] == reasons
    assert [row["status"] for row in rows(out)] == ["failed", "done", "failed"]
    assert rows(out)[0]["requests_total"] == "" and rows(out)[1]["requests_total"] == "2"
    (tmp_path / "own_swept.py").write_text(OWN.replace("def choose", "def chosen"))
    assert sweep(path, f"--out={out}")[0] == 0
    assert [row["status"] for row in rows(out)] == ["done"] * 3


def test_goodput_of_each_combination_and_the_runs_that_found_it(tmp_path):
    tables = "[axes]\nprefill_chunk = [4096]\n[goodput]\nlowest = 1\nhighest = 64\ntolerance = 1"
    path = write_sweep(tmp_path, tables, "ttft_slo = 5")
    code, printed, errors = sweep(path, "--goodput", f"--out={tmp_path / 'out'}")
    assert (code, errors) == (0, ""), errors
    [found] = rows(tmp_path / "out", "goodput.csv")
    assert found["answer"] == "found" and "found" in printed
    assert float(found["kept_attainment"]) >= 0.9 > float(found["failed_attainment"])
    assert 1 < float(found["failed_speed"]) / float(found["kept_speed"]) <= 2
    tried = {row["speed"]: row for row in rows(tmp_path / "out")}
    assert len(tried) == int(found["runs"]) == 5
    assert tried[found["kept_speed"]]["attainment"] == found["kept_attainment"]
    assert float(found["kept_requests_per_s"]) == pytest.approx(0.5 * float(found["kept_speed"]))


def test_a_picture_of_figures_over_the_numeric_axis(tmp_path):
    pytest.importorskip("matplotlib")
    points = [(policy, speed) for policy in ("random", "cache-aware") for speed in ("1", "20")]
    table = [{"speed": speed, "policy": policy, "ttft_s_p90": float(speed)} for policy, speed in points]
    draw(tmp_path / "sweep.png", ["ttft_s_p90"], ["speed", "policy"], [*table, {"speed": "2", "policy": "random"}])
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
