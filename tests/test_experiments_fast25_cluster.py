"""FAST25's figures 5, 11, 13 and 15: that they run on a small trace, and what they count, by hand."""

import csv
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mooncake_jax.request import Request
from mooncake_jax.workload.poisson import poisson_rows
from mooncake_jax.workload.released import RELEASED
from mooncake_jax.workload.trace import write_trace

FOLDER = Path(__file__).parent.parent / "experiments"
FIGURES = ("fast25_fig05", "fast25_fig11", "fast25_fig13", "fast25_fig15")


@pytest.fixture
def figures(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("fast25_cluster", "boxes", "sampling", *FIGURES)
    return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    for name in ("conversation", "synthetic", "toolagent"):
        write_trace(folder / RELEASED[name].file_name, poisson_rows("simulated-16k", 60, 1.0, 0), "a test")
    return folder


@pytest.mark.parametrize("name", FIGURES)
def test_it_runs_and_leaves_numbers_behind(name, traces, tmp_path):
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--quick", f"--traces={traces}", f"--out={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / f"{name}.json").read_text())
    assert told["claim"] and told["headlines"] and told["lessons"]
    with (tmp_path / f"{name}.csv").open(newline="") as lines:
        assert {"paper", "fast25"} <= {row["source"].split(",")[0] for row in csv.DictReader(lines)}


def requests_of(*tokens):
    return [Request(str(place), 100.0 * place, n, 3, block_keys=(), ignore_eos=True) for place, n in enumerate(tokens)]


def test_ttft_with_the_first_step_is_that_much_longer(figures):
    of = figures.fast25_cluster
    setup = of.Setup("", "fast25", "predicted", {"prefill": 1, "decode": 1})
    bare, whole = (of.serve(requests_of(8192), setup.changed(first_step=first)) for first in (False, True))
    assert whole.mean_ttft - bare.mean_ttft == pytest.approx(setup.cost().step(1, 8193), rel=1e-6)
    assert bare.mean_ttft == bare.outcomes[0].ttft_s


def test_a_request_of_one_token_ends_with_its_prefill(figures):
    of = figures.fast25_cluster
    request = Request("0", 0.0, 1000, 1, block_keys=(), ignore_eos=True)
    served = of.serve([request], of.Setup("", "micro", "predicted", {"prefill": 1}, first_step=True))
    assert served.ttfts == {"0": served.outcomes[0].ttft_s}


def test_a_setup_changes_its_costs_and_the_simulation_apart(figures):
    of = figures.fast25_cluster
    setup = of.Setup("", "fast25", "fitted", {"prefill": 7}, request_ms=4.0, prefill_factor=1.1).changed(decode=9)
    plain = of.Setup("", "fast25", "predicted", {}).cost()
    assert setup.fields == {"prefill": 7, "decode": 9}
    assert setup.cost().step(1, 8192) == pytest.approx(plain.step(1, 8192))
    assert setup.cost().step(11, 8192) - setup.cost().step(1, 8192) == pytest.approx(0.04)
    assert setup.cost().prefill_compute(9000, 0) == pytest.approx(1.1 * plain.prefill_compute(9000, 0))


def test_a_trace_replayed_faster_has_all_arrivals_sooner(figures):
    requests = requests_of(10, 20, 30)
    assert [request.arrival for request in figures.fast25_cluster.faster(requests, 2.0)] == [0.0, 50.0, 100.0]


def test_the_knee_lies_between_the_bandwidths_where_ttft_passes_it(figures):
    knee = figures.fast25_fig13.knee
    assert knee([(10.0, 9.0), (40.0, 3.0), (160.0, 2.0)]) == pytest.approx(40.0)
    assert 40 < knee([(10.0, 9.0), (40.0, 4.0), (160.0, 2.0)]) < 160
    assert knee([(10.0, 2.1), (40.0, 2.0)]) is None


def test_a_view_is_looked_at_before_what_comes_next_is_handled(figures):
    view = SimpleNamespace(handled=0)

    def handle(message, now):
        view.handled += 1
        return []

    conductor = SimpleNamespace(view=view, handle=handle)
    sampled = figures.sampling.Sampled(conductor, 30.0, lambda view, due: (due, view.handled))
    for now in (0.0, 31.0, 59.0, 95.0):
        sampled.handle(None, now)
    assert sampled.samples == [(0.0, 0), (30.0, 1), (60.0, 3), (90.0, 3)]


def test_blocks_are_ranked_by_all_samples_together(figures, monkeypatch):
    monkeypatch.setattr(figures.fast25_fig11, "RANKS", (1, 2))
    series = figures.fast25_fig11.series_of([{}, {b"a": 3, b"b": 1}, {b"a": 0, b"b": 4}])
    assert series == {1: [(0.0, 0), (30.0, 1), (60.0, 4)], 2: [(0.0, 0), (30.0, 3), (60.0, 0)]}


def test_an_end_falls_only_below_the_plateau(figures):
    of = {p: {"effective": 99.0} for p in range(5, 12)}
    of[11]["effective"], of[5]["effective"] = 97.9, 98.5
    assert [figures.fast25_fig15.falls(of, end) for end in (5, 11)] == ["stays", "falls"]


def test_the_ends_are_fitted_where_effective_requests_are(figures):
    of = figures.fast25_fig15
    found, expected = {p: dict.fromkeys(of.UNITS, 99.0) for p in of.SPLITS}, of.paper()
    of.FLAGS(["fast25_fig15"])
    for setup in of.SETUPS:
        kinds = {row.kind for row in of.headlines_of(setup, found, expected, "a trace") if "effective" in row.name}
        assert kinds == {setup.kind}


def test_a_box_reaches_to_the_last_value_near_it(figures):
    assert figures.boxes.box_of([1.0, 2.0, 3.0, 4.0, 100.0]) == {
        "whisker_low": 1.0, "q1": 2.0, "median": 3.0, "q3": 4.0, "whisker_high": 4.0, "mean": 22.0
    }  # fmt: skip
    with pytest.raises(ValueError, match="no value"):
        figures.boxes.box_of([])


def test_replicas_of_several_seeds_are_told_by_their_mean(figures):
    of = figures.fast25_fig11
    one, two = {10: [(0.0, 1), (30.0, 4)]}, {10: [(0.0, 2), (30.0, 2), (60.0, 9)], 100: [(0.0, 0)]}
    assert of.peaks([one, two]) == {10: 6.5}
    assert of.last([one, two], 10) == 6.5
    assert of.means([one, two], 10) == ([(0.0, 1.5), (30.0, 3.0)], [(1, 2), (2, 4)])


def test_a_transfer_in_theory_takes_the_whole_prompt_over_the_bandwidth(figures):
    of, requests = figures.fast25_fig13, requests_of(1000, 3000)
    ours = {setup.label: of.curve(requests, setup, [24.0]) for setup in of.SETUPS}
    times = of.transfers(requests, ours, [24.0])
    assert times[of.THEORETICAL]["ours"] == [(24.0, pytest.approx(2000 * of.KV_BYTES / 3e9))]
    for setup in of.SETUPS:
        [(_, added)] = times[of.REAL][setup.label]
        assert added == pytest.approx(times[of.THEORETICAL]["ours"][0][1], rel=1e-3), "nobody else sends"
