"""The frame of experiments/: tolerances, what a figure leaves behind, the paper's points, and the page."""

import csv
import importlib
import importlib.util
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from mooncake_jax.commands import simulate_flags
from mooncake_jax.errors import UsageError
from mooncake_jax.sched.profiles import SCHEDULE_S
from mooncake_jax.simulate.config import config_of
from mooncake_jax.workload.poisson import poisson_rows
from mooncake_jax.workload.trace import write_trace

FOLDER = Path(__file__).parent.parent / "experiments"
MODULES = ("clusters", "figure", "listing", "page", "pictures", "reference", "sources", "style")
PLOTS = importlib.util.find_spec("matplotlib") is not None
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.fixture
def frame(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})


def headline(frame, paper, ours, tolerance, **changes):
    fields = {"name": "capacity, %", "profile": "fast25", "trace": "generated", "kind": "predicted"} | changes
    return frame.figure.Headline(paper=paper, ours=ours, tolerance=tolerance, **fields)


# --- headline numbers


@pytest.mark.parametrize(
    ("tolerance", "paper", "ok", "miss"),
    [
        (("share", 0.05), 10.0, 10.5, 10.51),
        (("share", 0.05), -10.0, -9.5, -9.4),
        (("points", 2.0), 96.6, 94.6, 94.5),
        (("between", 250, 500), 498, 250, 249.9),
        (("at_least", 98), 99.8, 98.0, 97.9),
        (("at_most", 30), None, 30.0, 30.1),
        (("same",), "a < b", "a < b", "b < a"),
    ],
)
def test_a_headline_is_met_up_to_its_tolerance_and_not_beyond(frame, tolerance, paper, ok, miss):
    name, *limits = tolerance
    made = getattr(frame.figure, name)(*limits)
    assert [headline(frame, paper, ours, made).ok for ours in (ok, miss, None)] == [True, False, False]


def test_without_a_target_there_is_no_verdict_and_texts_have_no_ratio(frame):
    assert headline(frame, 2.0, 5.0, frame.figure.untargeted()).ok is None
    assert headline(frame, 2.0, 5.0, frame.figure.untargeted()).ratio == 2.5
    assert [headline(frame, paper, 1.0, frame.figure.same()).ratio for paper in (0.0, None, "x")] == [None] * 3


def test_a_sensitivity_has_a_result_for_each_value(frame):
    with pytest.raises(ValueError, match="chunk: 2 values, but 1 results"):
        frame.figure.Sensitivity("chunk", [1, 2], "capacity, %", [0.5])


# --- the paper's points


def test_rows_that_are_no_measurements_are_left_out(frame):
    ttft = frame.reference.points("arxiv_fig12_16k_ttft")
    flags = [row["flag"] for row in frame.reference.rows("arxiv_fig12_16k_ttft")]
    assert sum(map(len, ttft.values())) == flags.count("in_axes") == 11
    assert set(flags) == {"in_axes", "off_axis_exactly_1.2_display_cap", "extrapolated_beyond_canvas"}
    assert frame.reference.points("fast25_fig13_ttft") == {
        "Avg TTFT": [
            (24, 5.09421),
            (40, 2.40122),
            (80, 1.73021),
            (100, 1.59606),
            (160, 1.40627),
            (320, 1.24559),
            (400, 1.25221),
        ]
    }
    # Beyond the frame of the plot, but measured.
    assert ("q3", 29.2972) in frame.reference.points("fast25_fig05", "Random")["Random"]


def test_every_file_of_the_paper_has_points(frame):
    files = sorted(frame.reference.FOLDER.glob("*.csv"))
    assert len(files) >= 44 and all(file.stat().st_size < 1_000_000 for file in files)
    assert all(frame.reference.points(file.stem) for file in files)


def test_a_figure_depends_on_the_files_of_the_paper_that_were_read(frame):
    frame.reference.rows.cache_clear()
    frame.reference.points("fast25_fig01_06_07_thresholds")
    assert "experiments/paper/fast25_fig01_06_07_thresholds.csv" in frame.sources.digests("fast25_fig06")


def test_what_was_measured_depends_on_all_of_the_package_and_on_no_seed(frame, tmp_path):
    about = published(frame, tmp_path, "--real", name="fast25_fig12")
    assert {"mooncake_jax/cache/messenger.py", "mooncake_jax/cluster/export.py"} <= set(about["sources"])
    assert about["seeds"] == []


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (10_937.0, "10937"), (1234.56, "1235"), (0.000123456, "0.0001235"), (7, "7")]
)
def test_large_numbers_are_written_out(frame, value, text):
    assert frame.figure.shown(value) == text


def test_what_is_not_there_is_named(frame):
    with pytest.raises(UsageError, match="paper/fast25_fig15_capacity.csv has no series 'TTFT'; use one of Effective"):
        frame.reference.points("fast25_fig15_capacity", "TTFT")
    with pytest.raises(UsageError, match="nowhere.csv: No such file"):
        frame.reference.rows("nowhere")


# --- what a figure leaves behind


def published(frame, folder, *arguments, name="fast25_fig01", **changes):
    """A figure of one met, one missed and one untargeted number."""
    values = frame.figure.define_flags(name, seeds=4, real=True)
    frame.figure.parse(values, [f"--out={folder / name}", *arguments])
    to = frame.figure
    rows = [
        headline(frame, 96.6, 95.0, to.points(2), name="met <b>, %"),
        headline(frame, 16.1, 38.0, to.points(8), name="missed, %", note="`router` decides"),
        headline(frame, None, 3, to.untargeted(), name="shown"),
    ]
    fields = {"claim": "Mooncake & vLLM", "rows": [{"x": 1, "y": 0.1}, {"x": 2, "z": "<i>"}], "headlines": rows}
    fields |= {"sensitivities": [frame.figure.Sensitivity("ms a request", [3, 4], "met <b>, %", [99.0, 78.4])]}
    fields |= {"lessons": ["TBT decides."], "draw": lambda axes: axes.plot([1, 2], [3, 4])}
    assert frame.figure.publish(values, **fields | changes) == 0
    [file] = (folder / name).glob("*.json")
    return json.loads(file.read_text())


def test_a_figure_leaves_numbers_headlines_and_pictures_with_what_made_them(frame, tmp_path, capsys):
    about = published(frame, tmp_path, "--seeds=0,7")
    out = tmp_path / "fast25_fig01"
    assert about["command"] == "python experiments/fast25_fig01.py --seeds=0,7" and about["seeds"] == [0, 7]
    assert [row["ok"] for row in about["headlines"]] == [True, False, None]
    assert set(about["versions"]) == {"mooncake-jax", "python"}
    assert {"experiments/figure.py", "mooncake_jax/errors.py"} <= set(about["sources"])
    assert list(csv.DictReader((out / "fast25_fig01.csv").open())) == [
        {"x": "1", "y": "0.1", "z": ""},
        {"x": "2", "y": "", "z": "<i>"},
    ]
    shown = capsys.readouterr().out
    assert re.search(r"missed, % +16.1 +38 +2.36 +within 8 +MISS", shown)
    assert (out / "fast25_fig01.svg").exists() == (out / "fast25_fig01.png").exists() == PLOTS
    if PLOTS:
        assert b"--seeds=0,7; seeds [0, 7]" in (out / "fast25_fig01.png").read_bytes()
        assert "--seeds=0,7; seeds [0, 7]" in (out / "fast25_fig01.svg").read_text()
    else:
        assert "no picture, since matplotlib is not installed" in shown


def test_a_quick_run_claims_no_verdicts_and_uses_one_seed(frame, tmp_path):
    about = published(frame, tmp_path, "--quick", "--seeds=3,4")
    assert [row["ok"] for row in about["headlines"]] == [None] * 3
    assert (about["quick"], about["seeds"]) == (True, [3])


def test_what_this_machine_measured_has_a_name_of_its_own(frame, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = frame.figure.define_flags("fast25_fig14", real=True)
    frame.figure.parse(values, ["--real"])
    frame.figure.publish(values, claim="", rows=[], headlines=[], draw=lambda axes: None)
    about = json.loads(Path("results/fast25_fig14_real/fast25_fig14_real.json").read_text())
    assert about["command"] == "python experiments/fast25_fig14.py --real"


@pytest.mark.parametrize("folder", ["/proc", "/dev/null/x"])
def test_a_folder_that_takes_no_files_is_refused_before_anything_is_computed(frame, folder):
    with pytest.raises(UsageError, match=f"--out={folder}: .*; name a folder that can be written to"):
        frame.figure.parse(frame.figure.define_flags("fast25_fig01"), [f"--out={folder}"])


@pytest.mark.parametrize("seeds", ["", "1,x", "-1"])
def test_seeds_that_are_none_are_refused(frame, seeds):
    values = frame.figure.define_flags("fast25_fig01", seeds=4)
    with pytest.raises(UsageError, match=f"--seeds={seeds}: name integers from 0 on"):
        frame.figure.parse(values, [f"--seeds={seeds}"])


def test_a_seed_counts_once(frame):
    values = frame.figure.define_flags("fast25_fig01", seeds=4)
    with pytest.raises(UsageError, match="--seeds=1,01: each seed counts once; name different ones"):
        frame.figure.parse(values, ["--seeds=1,01"])


@pytest.mark.skipif(not PLOTS, reason="matplotlib is not installed")
def test_pictures_tell_ours_from_the_papers_without_colour(frame, tmp_path):
    style, seen = frame.style, {}

    def draw(lines, groups, curves, boxes):
        style.line(lines, [(1, 2), (2, 3)], "ours", 1, spread=[(1, 3), (2, 3)])
        style.line(lines, [(1, 2), (2, 4)], "paper", 1, paper=True)
        style.bars(
            groups, ["a", "b"], {"x": [1, 2], "y": [2, None]}, {"x": [1, 1], "y": [None, 2]}, spread={"x": [(0, 2)] * 2}
        )
        style.cdf(curves, [(1, 0.5), (2, 1)], "ours")
        style.cdf(curves, [(1, 0.4), (2, 1)], "paper", paper=True)
        box = dict(whisker_low=0, q1=1, median=2, q3=3, mean=2.5)
        style.box(boxes, {"a": box | {"whisker_high": 4}}, {"a": box})
        seen.update(lines=lines.lines, bars=groups.patches, curves=curves.lines)
        seen["labels"] = [axes.get_legend_handles_labels()[1] for axes in (lines, groups, curves, boxes)]

    told = frame.pictures.save_pictures(tmp_path, "all", draw, (2, 2), (6, 4), {"Title": "all"})
    assert told == ", pictures in all.png and all.svg" and (tmp_path / "all.svg").stat().st_size
    assert seen["labels"] == [["ours", "paper"], ["paper", "x", "y"], ["ours", "paper"], ["ours", "paper"]]
    for ours, *_, paper in (seen["lines"], seen["curves"]):
        assert paper.get_markerfacecolor() == "none" and paper.get_linestyle() != ours.get_linestyle()
    assert len({bar.get_hatch() for bar in seen["bars"]}) == 2


# --- clusters


@pytest.mark.parametrize("coupled", [0, 4])
def test_clusters_are_those_of_the_command_line(coupled):
    flags = simulate_flags.parse(["--trace=x", f"--coupled={coupled}", "--tbt_slo=0.1"])
    assert flags == config_of("llama2-70b", coupled=coupled, tbt_slo=0.1)
    assert flags.decision_s == SCHEDULE_S


def test_capacity_counts_all_requests(frame):
    trace = frame.clusters.Trace("generated", poisson_rows("l-eval", 40, 1.0, 0))
    outcomes = frame.clusters.run(trace.requests(speed=2), "fast25", prefill=2, decode=2).outcomes
    tbts = sorted(outcome.tbt_top10_s for outcome in outcomes)
    assert frame.clusters.capacity(outcomes, tbts[9]) == 25.0
    curve = frame.clusters.capacity_curve(outcomes)
    assert curve[9] == (tbts[9], 25.0) and curve[-1][1] == 100.0
    late = sorted(outcome.ttft_s for outcome in outcomes)[29]
    assert frame.clusters.capacity(outcomes, 1e9, late) == frame.clusters.capacity_curve(outcomes, late)[-1][1] == 75.0
    assert frame.clusters.cdf([3, 1]) == [(1, 0.5), (3, 1.0)] and frame.clusters.share_within([3, 1], 2.9) == 0.5


def test_traces_are_read_or_their_surrogates_made_and_say_so(frame, tmp_path):
    write_trace(tmp_path / "conversation_trace.jsonl", poisson_rows("l-eval", 120, 1.0, 0), "generated")
    values = frame.figure.define_flags("fast25_fig06", traces=True, trace=True)
    frame.figure.parse(values, ["--quick", f"--traces={tmp_path}", f"--out={tmp_path}"])
    conversation = frame.clusters.released(values, "conversation")
    assert (conversation.label, len(conversation.rows)) == ("conversation (real)", frame.clusters.QUICK_REQUESTS)
    assert frame.clusters.reports(values).label == "surrogate of the report's"
    for name in ("synthetic", "toolagent"):
        with pytest.raises(UsageError, match=f"{name}_trace.jsonl is missing; `mooncake-jax trace get {name} --dir="):
            frame.clusters.released(values, name)


# --- the page


class Page(HTMLParser):
    """Its rows of cells, and all that it refers to."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.references, self.cell = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.references += [value for name, value in attributes if name in ("src", "href", "srcset", "data")]
        self.cell = tag == "td" or self.cell
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        self.cell = self.cell and tag != "td"

    def handle_data(self, data):
        if self.cell:
            self.rows[-1][-1] += data


def test_the_page_has_every_row_and_picture_and_needs_nothing_else(frame, tmp_path):
    published(frame, tmp_path, name="fast25_fig12")
    published(frame, tmp_path, name="fast25_fig01", claim="<script>alert(1)</script>")
    rows = frame.page.write_page(tmp_path, ["arxiv_fig02"])
    assert rows == json.loads((tmp_path / "fidelity.json").read_text()) and len(rows) == 6
    assert tuple(rows[0]) == frame.page.FIELDS
    assert [row["where"] for row in rows] == ["fast25_fig01"] * 3 + ["fast25_fig12"] * 3
    text = (tmp_path / "index.html").read_text()
    page = Page(text)
    assert ["FAST25 figure 1", "1", "1", "1", "<script>alert(1)</script>"] in page.rows
    table = [row for row in page.rows if len(row) == 11]
    assert [row[:3] for row in table[:2]] == [
        ["FAST25 figure 1", "met <b>, %", "96.6"],
        ["FAST25 figure 1", "missed, %", "16.1"],
    ]
    assert [row[6] for row in table] == ["✓ met", "✗ MISS", "– no target"] * 2
    assert ["ms a request", "met <b>, %", "4 → 78.4"] in page.rows and ["2", "", "<i>"] in page.rows
    assert "Failed, and not below: arxiv_fig02." in text and "<script>" not in text
    assert table[1][-1] == "router decides" and '<td data-name="why"><code>router</code> decides</td>' in text
    assert "The paper has 4 of them: 0 rest on a constant" in text and "4 on none (predicted)" in text
    outside = [reference for reference in page.references if not reference.startswith(("#", "data:image/"))]
    assert not outside and text.count("<img") == (2 if PLOTS else 0) and "TBT decides." in text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.skipif(not PLOTS, reason="matplotlib is not installed")
@pytest.mark.parametrize("width", [380, 1200])
def test_a_browser_loads_the_page(frame, tmp_path, width):
    published(frame, tmp_path)
    frame.page.write_page(tmp_path)
    page = tmp_path / "index.html"
    check = (
        "onload = () => { const i = [...document.images]; document.title = [i.length, i.every(x => x.complete && "
        "x.naturalWidth > 0), document.querySelectorAll('#fidelity + table tbody tr').length, "
        "document.documentElement.scrollWidth <= innerWidth].join() }"
    )
    page.write_text(page.read_text().replace("</body>", f"<script>{check}</script></body>"))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += [f"--window-size={width},800", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert re.search("<title>(.*)</title>", done.stdout)[1] == "1,true,3,true", done.stderr
