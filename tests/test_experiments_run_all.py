"""All figures at once: what run_all.py finds, makes, leaves out and refuses."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "experiments"


@pytest.fixture
def listing(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("listing")


def run_all(*arguments):
    command = [sys.executable, str(FOLDER / "run_all.py"), *arguments]
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parent)}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_experiments_are_found_with_what_they_need(listing):
    found = {experiment.name: experiment for experiment in listing.experiments()}
    fig14 = listing.Experiment("fast25_fig14", real=True, seconds=1.0, real_seconds=120.0)
    assert found["fast25_fig14"] == fig14
    assert not {"sim_vs_real", "figure", "run_all", "machine_engine"} & set(found)
    # Each says what it takes, by which run_all tells the time left.
    assert all(one.seconds and (one.real_seconds is not None) == one.real for one in found.values())


@pytest.mark.parametrize(
    ("told", "seconds"),
    [
        ("a second", 1),
        ("47 s of CPU", 47),
        ("4 seeds: half a minute", 30),
        ("1 minute and a half", 90),
        ("2.5 minutes", 150),
    ],
)
def test_headers_say_how_long_it_takes(listing, tmp_path, monkeypatch, told, seconds):
    header = f'"""What.\n\n    python experiments/one.py --traces=DIR  # {told}\n"""\n'
    (tmp_path / "one.py").write_text(f'{header}FLAGS = define_flags("one", traces=True)\n')
    monkeypatch.setattr(listing, "FOLDER", tmp_path)
    assert listing.experiments() == [listing.Experiment("one", traces=True, seconds=seconds)]


def test_run_all_makes_what_is_not_made_by_the_same_code_and_goes_on_after_a_failure(tmp_path):
    (tmp_path / "fast25_fig14").write_text("in the way")
    done = run_all("--only=fast25_fig14,arxiv_fig07", f"--out={tmp_path}")
    assert done.returncode == 1
    assert "fast25_fig14 failed: experiments/fast25_fig14.py: --out=" in done.stderr
    assert "Failed, and not below: fast25_fig14." in (tmp_path / "index.html").read_text()
    assert {row["where"] for row in json.loads((tmp_path / "fidelity.json").read_text())} == {"arxiv_fig07"}
    made = tmp_path / "arxiv_fig07" / "arxiv_fig07.json"
    before = made.stat().st_mtime_ns
    done = run_all("--only=arxiv_fig07", f"--out={tmp_path}")
    assert (done.returncode, made.stat().st_mtime_ns) == (0, before), done.stderr
    assert "1 figures, 1 of them made before" in done.stdout
    made.write_text(made.read_text().replace('"experiments/figure.py": "', '"experiments/figure.py": "0'))
    assert "1 figures, 0 of them made before" in run_all("--only=arxiv_fig07", f"--out={tmp_path}").stdout


def test_run_all_shows_nothing_of_a_figure_that_failed(tmp_path):
    stale = tmp_path / "fast25_fig14"
    stale.mkdir()
    about = {"name": "fast25_fig14", "arguments": ["--quick"], "sources": {}, "headlines": []}
    (stale / "fast25_fig14.json").write_text(json.dumps(about))
    (stale / "fast25_fig14.csv").mkdir()  # in the way
    assert run_all("--only=fast25_fig14", f"--out={tmp_path}").returncode == 1
    assert json.loads((tmp_path / "fidelity.json").read_text()) == []
    text = (tmp_path / "index.html").read_text()
    assert "Failed, and not below: fast25_fig14." in text and '<section id="fast25_fig14">' not in text


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        (
            "--traces=nowhere",
            "--traces=nowhere: FAST25's traces are not there; `mooncake-jax trace get conversation",
        ),
        ("--trace=missing.jsonl", "--trace=missing.jsonl: there is no such file; leave it out"),
        ("--out=/proc", "--out=/proc: "),
    ],
)
def test_run_all_refuses_what_no_figure_could_use_before_it_starts_any(tmp_path, flag, complaint):
    (tmp_path / "synthetic_trace.jsonl").touch()
    done = run_all("--only=beyond_ssd", f"--traces={tmp_path}", f"--out={tmp_path / 'out'}", flag)
    assert done.returncode == 2 and done.stderr.startswith(f"experiments/run_all.py: {complaint}"), done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "out").exists()


def test_run_all_measures_this_machine_one_figure_at_a_time(tmp_path):
    done = run_all("--target=real", "--only=fast25_fig12", "--jobs=2", f"--out={tmp_path / 'out'}")
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert done.stderr.startswith("experiments/run_all.py: --jobs=2: --target=real measures this machine, figure by")
    assert len(done.stderr.splitlines()) == 1


def test_run_all_refuses_a_figure_that_it_does_not_know(tmp_path):
    done = run_all("--only=fast25_fig99", f"--out={tmp_path}")
    assert done.returncode == 2
    assert done.stderr.startswith("experiments/run_all.py: --only=fast25_fig99: --target=simulated has no such figure")
    assert len(done.stderr.splitlines()) == 1
