"""The report's figures 8 to 13 and table 3: that they run on small traces, and how they count, by hand."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mooncake_jax.request import COMPLETED, REJECTED
from mooncake_jax.workload.poisson import poisson_rows
from mooncake_jax.workload.trace import write_trace

FOLDER = Path(__file__).parent.parent / "experiments"
MODULES = ("arxiv_fig12", "documents", "overload", "poisson_rates")


CHOSEN_ON = {  # profiles with which something was chosen on the figure: the load, the cluster, or the profile itself
    "arxiv_fig08": {"arxiv", "micro"},
    "arxiv_fig09": {"fast25", "arxiv", "micro"},
    "arxiv_fig10": {"fast25", "arxiv", "micro"},
    "arxiv_fig13": {"fast25", "vllm051", "fast25/vllm051"},
    "arxiv_table3": {"fast25"},
}


@pytest.fixture
def ours(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})


def as_script(name, *flags):
    command = [sys.executable, str(FOLDER / f"{name}.py"), *flags]
    path = os.pathsep.join(filter(None, (str(FOLDER.parent), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    write_trace(folder / "conversation_trace.jsonl", poisson_rows("l-eval", 60, 2.0, 0), "l-eval, for a test")
    return folder


@pytest.mark.parametrize(
    ("name", "trace"),
    [
        ("arxiv_fig08", True),
        ("arxiv_fig09", True),
        ("arxiv_fig10", True),
        ("arxiv_fig11", False),
        ("arxiv_fig12", False),
        ("arxiv_fig13", True),
        ("arxiv_table3", True),
    ],
)
def test_a_figure_runs_on_a_few_requests(name, trace, small, tmp_path):
    flags = [f"--traces={small}"] if trace else []
    if name in ("arxiv_fig08", "arxiv_fig13", "arxiv_table3"):
        flags.append(f"--trace={small / 'conversation_trace.jsonl'}")
    done = as_script(name, "--quick", f"--out={tmp_path}", *flags)
    assert done.returncode == 0, done.stderr
    about = json.loads((tmp_path / f"{name}.json").read_text())
    assert about["headlines"] and all(row["ok"] is None for row in about["headlines"])
    if name in CHOSEN_ON:
        assert {row["profile"] for row in about["headlines"] if row["kind"] == "fitted"} == CHOSEN_ON[name]
    assert (tmp_path / f"{name}.csv").read_text().count("\n") > 2


def test_documents_are_asked_about_so_many_times_each_and_found_as_a_whole(ours):
    rows = ours.documents.asked("l-eval", 60, 1.0, 3, questions=6, at_once=4).rows
    by_document = {}
    for row in rows:
        by_document.setdefault(row.hash_ids[0], []).append(row)
    assert len(rows) == 60 and max(map(len, by_document.values())) == 6
    for asked in by_document.values():
        shared = {row.hash_ids[:-1] for row in asked}
        assert len(shared) == 1 and len({row.input_length for row in asked}) == 1
        assert len({row.hash_ids[-1] for row in asked}) == len(asked)
        assert len(asked[0].hash_ids) == -(-asked[0].input_length // 512)
    open_at_once = [
        len({one for one, asked in by_document.items() if asked[0].index <= row.index <= asked[-1].index})
        for row in rows
    ]
    assert max(open_at_once) <= 4


def test_a_seed_asks_alike_at_every_rate(ours):
    slow, fast = (ours.documents.asked("simulated-16k", 20, rate, 1, 2, 4).rows for rate in (1.0, 4.0))
    assert [row.hash_ids for row in slow] == [row.hash_ids for row in fast]
    assert slow[-1].timestamp == pytest.approx(4 * fast[-1].timestamp, abs=4)


RATIOS = {1.0: {"ttft": 0.2, "tbt": 0.3}, 2.0: {"ttft": 0.6, "tbt": 0.4}, 3.0: {"ttft": 9.0, "tbt": 0.5}}


def test_a_crossing_lies_on_the_line_as_it_is_drawn(ours):
    rate, what = ours.poisson_rates.crossing(RATIOS)
    assert what == "TTFT" and rate == pytest.approx(2 + (1 - 0.6) / (1.2 - 0.6))
    assert ours.poisson_rates.crossing({1.0: RATIOS[1.0]}) == (1.0, "none")
    assert ours.poisson_rates.crossing({1.0: {"ttft": 0.1, "tbt": 1.1}}) == (1.0, "TBT")


def test_the_largest_rate_is_below_the_first_that_breaks_an_slo(ours):
    largest = ours.poisson_rates.largest_kept
    assert largest(RATIOS) == 2.0 and largest(RATIOS | {4.0: RATIOS[1.0]}) == 2.0
    assert largest({3.0: RATIOS[3.0]}) == 0.0


def test_the_reports_rates_are_its_csvs_and_some_are_tried_beyond(ours):
    rates = {workload.name: workload.rates for workload in ours.arxiv_fig12.WORKLOADS}
    assert ours.poisson_rates.papers_rates("arxiv_fig12_128k") == (0.02, 0.05, 0.1, 0.11, 0.12, 0.14)
    assert rates["simulated-16k"] == (0.1, 0.2, 0.5, 1, 1.25, 1.5, 2, 2.5, 4)
    assert all(list(each) == sorted(set(each)) for each in rates.values())


def test_a_step_is_one_of_the_grid_and_a_lower_bound_is_named(ours):
    figure = ours.arxiv_fig12
    [long] = [workload for workload in figure.WORKLOADS if workload.name == "simulated-32k"]
    found = {system: [{0.1: RATIOS[1.0]}] for system in figure.SYSTEMS}
    rows = dict(zip(found, figure.headlines(long, "micro", found, (0,)), strict=True))
    assert [rows[system].tolerance.text for system in figure.SYSTEMS] == ["0.5 to 0.8", "0.5 to 0.8", "0.1 to 0.5"]
    assert "lower bound" in rows[figure.THREE].note and "lower bound" not in rows[figure.VLLM].note
    [short, *_] = figure.WORKLOADS
    assert figure.within_a_step(short, 1.25).text == "1 to 1.5"


def test_the_papers_capped_points_are_drawn_at_the_edge(ours):
    drawn = ours.poisson_rates.paper_points(ours.arxiv_fig12.WORKLOADS[0], "ttft")
    assert [ratio for _, ratio in drawn["vLLM-[4M]"]] == pytest.approx([0.0895097, 0.529367, 1.2, 1.2, 1.2, 1.2])
    assert drawn["Mooncake-[2P+2D]"][-1] == (1.25, 1.2)  # the CSV's is inferred from where the line leaves the canvas


def test_slos_are_those_of_the_mean_of_all_systems_at_the_lowest_rate(ours):
    workload = ours.poisson_rates.Workload("simulated-16k", "", (0.1, 0.2), 12, 2, 4, "one_by_one")
    found = ours.poisson_rates.measure(workload, "micro", [0])
    for what, times in ours.poisson_rates.SLO_TIMES.items():
        lowest = [by_seed[0][0.1][what] for by_seed in found.values()]
        assert sum(lowest) / 3 == pytest.approx(1 / times)
    alone = ours.poisson_rates.measure(workload, "micro", [0], ["vLLM-[4M]"])
    assert alone == {"vLLM-[4M]": found["vLLM-[4M]"]}


def test_loads_are_sampled_while_requests_arrive_and_requests_counted_as_they_end(ours):
    overload = ours.overload
    requests = sys.modules["clusters"].Trace("l-eval", poisson_rows("l-eval", 150, 4.0, 0)).requests()
    served = overload.serve(requests, "baseline", "fast25", prefill=1, decode=1)
    last = max(request.arrival for request in requests)
    assert [sample.seconds for sample in served.samples] == [15.0 * place for place in range(int(last // 15) + 1)]
    assert served.samples[0] == (0.0, 0.0, 0.0) and max(sample.prefill for sample in served.samples) > 0.5
    assert served.rejected == sum(outcome.status == REJECTED for outcome in served.outcomes) > 0
    done = [outcome for outcome in served.outcomes if outcome.status == COMPLETED]
    assert served.good() == sum(o.ttft_s <= 30 and (o.tbt_top10_s or 0) <= 0.1 for o in done)
    assert served.good(limit=9.0) == sum(o.ttft_s <= 30 for o in done) == len(done)


@pytest.mark.traces
def test_loads_swing_in_anti_phase_under_early_rejection_and_not_with_prediction(ours, traces):
    figure = importlib.import_module("arxiv_fig09")
    figure.parse(figure.FLAGS, [f"--traces={traces}"])
    trace = figure.released(figure.FLAGS, "conversation")
    early, predicted = (figure.overloaded(trace, name, "fast25").steady for name in (figure.EARLY, figure.PREDICTED))
    assert figure.correlated(early) < -0.4 and figure.correlated(predicted) > -0.25
    assert figure.deviation(predicted) < 0.5 * figure.deviation(early)


def test_what_has_left_the_picture_counts_as_its_edge(ours):
    left, within = {1.0: {"ttft": 0.2, "tbt": 0.3}, 2.0: {"ttft": 9.0, "tbt": 0.4}}, RATIOS
    drawn = {
        (rate, what): list(ours.poisson_rates._drawn([left, within], rate, what))
        for rate in (2.0, 3.0)
        for what in ("ttft", "tbt")
    }
    assert drawn == {
        (2.0, "ttft"): [1.2, 0.6],
        (3.0, "ttft"): [1.2, 1.2],
        (2.0, "tbt"): [0.4, 0.4],
        (3.0, "tbt"): [0.5],
    }


def test_random_is_of_all_seeds_and_surrogates_of_each_its_own(ours, small, tmp_path):
    figure = importlib.import_module("arxiv_fig08")
    seeds = [f"--traces={small}", f"--out={tmp_path}", "--prefill=2", "--decode=1", "--seeds=0,1"]
    figure.parse(figure.FLAGS, seeds)
    trace = figure.released(figure.FLAGS, "conversation")
    other = type(trace)("another", poisson_rows("l-eval", 60, 2.0, 1))
    found = figure.boxes([trace], "micro", 1.0, ("cache-aware", "random"))
    assert found["cache-aware"]["least_mean"] == found["cache-aware"]["greatest_mean"]
    assert found["random"]["least_mean"] < found["random"]["mean"] < found["random"]["greatest_mean"]
    both = figure.boxes([trace, other], "micro", 1.0, ("cache-aware",))["cache-aware"]
    assert both["least_mean"] < both["mean"] < both["greatest_mean"]


def test_the_best_policy_is_named_by_capacity_and_equals_together(ours):
    figure = importlib.import_module("arxiv_table1")
    assert figure.best({"LRU": 0.304, "LFU": 0.296, "LengthAware": 0.294}) == "LRU = LFU"
    hits = {"LRU": (0.3, 0.4, 0.5), "LFU": (0.1, 0.2, 0.52), "LengthAware": (0.1, 0.2, 0.3)}
    blocks = (10_000, 50_000, 100_000)
    found = {
        (name, each): figure.Spread([rate])
        for name, rates in hits.items()
        for each, rate in zip((*blocks, float("inf")), (*rates, 0.6), strict=True)
    }
    theirs = {name: {each: rate.mean for (of, each), rate in found.items() if of == name} for name in hits}
    rows = figure.headlines(found, theirs, {"trace": "a surrogate", "kind": "fitted"})
    assert len(rows) == 15 and all(row.ok for row in rows)
    kinds = {row.name: row.kind for row in rows}
    assert kinds["LRU, 10,000 blocks"] == kinds["LFU, no limit"] == "fitted"
    assert kinds["LFU, 10,000 blocks"] == kinds["best at 10,000 blocks"] == "predicted"
    assert "LRU at 10,000, 50,000 blocks; LFU at 100,000 blocks" in figure.lessons(found)[1]


def test_four_stages_begin_with_a_low_decoding_load(ours):
    figure = importlib.import_module("arxiv_fig10")
    loads = (0.5, 0.9, 0.1, 0.8, 0.2, 0.6, 0.5, 0.7)
    samples = [ours.overload.Sample(15.0 * place, 1 - load, load) for place, load in enumerate(loads)]
    assert [stage.decoding for stage in figure.stages(samples)] == [0.5, 0.9, 0.1, 0.8]  # not 0.9, 0.1, 0.8, 0.2
    assert [stage.decoding for stage in figure.stages(samples[1:3])] == [0.9]


@pytest.mark.parametrize(
    ("name", "flag", "problem"),
    [
        ("arxiv_fig08", "--speed=inf", "use 0.001 to 1000"),
        ("arxiv_fig09", "--speed=1e9", "use 0.001 to 1000"),
        ("arxiv_fig09", "--decoding_time_s=nan", "it must be above 0 seconds"),
        ("arxiv_fig09", "--decoding_time_s=-5", "it must be above 0 seconds"),
        ("arxiv_fig13", "--speed=nan", "use 0.001 to 1000"),
        ("arxiv_table3", "--speed=0", "use 0.001 to 1000"),
    ],
)
def test_what_no_figure_can_use_is_told_before_traces_are_read(name, flag, problem, tmp_path):
    done = as_script(name, flag, f"--out={tmp_path}", f"--traces={tmp_path / 'none'}")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(f"experiments/{name}.py: {flag.split('=')[0]}=") and line.endswith(f": {problem}")


def test_a_trace_in_which_nothing_comes_twice_has_a_lesson_too(ours):
    figure = importlib.import_module("arxiv_table1")
    nothing = figure.Spread([0.0])
    [lesson] = figure.lessons({("LRU", capacity): nothing for capacity in (50_000, float("inf"))})
    assert "nothing can be hit" in lesson
