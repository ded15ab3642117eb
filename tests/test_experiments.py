"""experiments/: that they run on a tiny model and say what they found, and their models by hand. Never how fast."""

import csv
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DATA

FOLDER = Path(__file__).parent.parent / "experiments"


@pytest.fixture
def storing(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("storing")


def run(*arguments):
    return run_script("arxiv_fig07.py", "--real", f"--model={DATA / 'tiny-llama2'}", *arguments)


def run_script(name, *arguments):
    command = [sys.executable, str(FOLDER / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_serialized_storing_takes_all_bytes_after_the_prefill(storing):
    assert storing.serialized_s(300.0, 100.0) == 3.0


def test_layer_wise_storing_adds_the_last_layer_where_the_link_keeps_up(storing):
    # Two chunks of two layers: a layer computes for 1 s and sends for 0.5 s.
    assert storing.layer_wise_s([2.0, 2.0], [100.0, 100.0], 2, 100.0) == 0.5


def test_layer_wise_storing_adds_what_a_slow_link_has_left(storing):
    # Computed at 1, 2, 3, 4 s; each takes the link 2 s, from 1 s on: until 9 s.
    assert storing.layer_wise_s([2.0, 2.0], [400.0, 400.0], 2, 100.0) == 5.0
    # The second chunk's computation leaves time to catch up: sent at 1..5, then at 11, 12..14 as each comes.
    assert storing.layer_wise_s([2.0, 20.0], [400.0, 400.0], 2, 100.0) == 2.0


def test_the_reports_machine_stores_in_time_layer_by_layer(storing):
    serialized, layer_wise = storing.a800_added_s(128_000)
    assert serialized == pytest.approx(128_000 * 80 * 2 * 8 * 128 * 2 / 87.5e9)
    assert layer_wise < 0.01 * serialized
    # At a rate that the computation outruns, most of it is left for the end.
    assert storing.a800_added_s(128_000, bytes_per_s=1e9)[1] > 0.3 * 128_000 * 327_680 / 1e9


def test_figure_7_is_measured_and_compared(tmp_path):
    out = tmp_path / "out"
    done = run("--lengths=256,64", "--prefill_chunk=64", "--repeats=1", f"--out={out}")
    assert done.returncode == 0, done.stderr
    with (out / "arxiv_fig07_real.csv").open() as file:
        rows = list(csv.DictReader(file))
    lengths = {
        source: [int(row["prompt_tokens"]) for row in rows if row["source"] == source] for source in sources(rows)
    }
    assert list(lengths.values()) == [[64, 256] * 2, [8192, 16384, 32768, 65536, 131072] * 2]
    assert rows[-6]["added_s"] == "0.8656"
    # The link takes 0.8 of the computation for the longest, whatever the machine.
    assert all(float(row["added_s"]) > 0 for row in rows if row["way"] == "serialized")
    headlines = json.loads((out / "arxiv_fig07_real.json").read_text())["headlines"]
    assert [row["where"] for row in headlines] == ["arxiv_fig07_real"] * 3
    drawn = importlib.util.find_spec("matplotlib") is not None
    assert (out / "arxiv_fig07_real.png").exists() == drawn == ("no picture" not in done.stdout)


def sources(rows):
    return dict.fromkeys(row["source"] for row in rows)


def test_figure_14_is_measured_on_the_engine(tmp_path):
    model = f"--model={DATA / 'tiny-llama2'}"
    done = run_script("fast25_fig14.py", "--real", "--quick", model, "--longest=256", f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr
    with (tmp_path / "fast25_fig14_real.csv").open() as file:
        ours = [row for row in csv.DictReader(file) if row["source"].startswith("this machine")]
    assert [(row["reuse"], row["part"], row["prompt_tokens"]) for row in ours] == [
        ("nothing reused", "Prefill", "64"),
        ("nothing reused", "Prefill", "256"),
        ("nothing reused", "Decode", "64"),
        ("nothing reused", "Decode", "256"),
        ("95 % reused", "Prefill", "64"),
        ("95 % reused", "Prefill", "256"),
    ]
    assert all(float(row["seconds"]) > 0 for row in ours)


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        ("--lengths=10,x", "--lengths=10,x: name numbers of tokens from 1 to the model's context of 2048"),
        ("--share=0", "--share=0.0: it must be above 0"),
        ("--out=/dev/null/x", "--out=/dev/null/x: Not a directory"),
        ("extra", "'extra' is no flag"),
    ],
)
def test_bad_flags_end_with_one_line(tmp_path, flag, complaint):
    done = run("--lengths=64", f"--out={tmp_path}", flag)
    assert done.returncode == 2
    assert done.stderr.startswith("experiments/arxiv_fig07.py: ") and complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no such call on this system")
def test_sim_vs_real_counts_the_cores_that_it_may_use():
    script = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); import sim_vs_real as s"
    done = subprocess.run(
        [sys.executable, "-c", f"{script}; print(s.CORES)"], capture_output=True, text=True, cwd=FOLDER
    )
    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        ("--load=1", "--load=1.0: it must be above 0 and below 1"),
        ("--cost=nowhere.json", "nowhere.json: No such file or directory"),
        ("extra", "'extra' is no flag"),
    ],
)
def test_sim_vs_real_refuses_bad_flags_with_one_line(tmp_path, flag, complaint):
    done = run_script("sim_vs_real.py", f"--out={tmp_path}", flag)
    assert done.returncode == 2
    assert done.stderr.startswith("experiments/sim_vs_real.py: ") and complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the system does not tell what others do")
def test_what_an_experiment_computes_is_not_others_work(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    other_work = importlib.import_module("other_work")
    work = "import time\nwhile time.process_time() < 0.3: pass"
    begun, own = other_work.OtherWork(), other_work._own_s()
    subprocess.run([sys.executable, "-c", work], check=True)
    assert other_work._own_s() - own >= 0.3
    assert 0 <= begun.cores() <= os.cpu_count()
