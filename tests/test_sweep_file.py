"""The file of a sweep: which combinations it stands for, and that all which is wrong is told before anything runs."""

import json
import re
from pathlib import Path

import pytest
from sweeps import write_sweep, write_trace

from mooncake_jax.__main__ import run
from mooncake_jax.commands import sweep as sweep_command
from mooncake_jax.commands.sweep_checks import check_flags, claim_folder
from mooncake_jax.commands.sweep_file import GoodputSearch, read_sweep
from mooncake_jax.errors import UsageError
from mooncake_jax.sched.cost import PolynomialCost
from mooncake_jax.sched.cost_file import CostFile, CostRange, write_cost_file


@pytest.fixture(autouse=True)
def fresh_flags():
    """Flags of one command line are not those of the next."""
    yield
    sweep_command.FLAGS.unparse_flags()
    for name in sweep_command.FLAGS:
        sweep_command.FLAGS[name].unparse()


def test_every_case_meets_every_combination_and_the_last_axis_changes_fastest(tmp_path):
    tables = (
        "[axes]\nspeed = [1, 2.5]\nrecheck = [true, false]\n"
        '[[cases]]\npolicy = "random"\nwithout = []\n[[cases]]\nwithout = ["ssd", "overlap"]\npolicy = "cache-aware"\n'
    )
    file = read_sweep(write_sweep(tmp_path, tables))
    check_flags(file, goodput=False)
    assert file.columns == ("policy", "without", "speed", "recheck")
    assert [tuple(combination.values()) for combination in file.combinations()] == [
        (policy, without, speed, recheck)
        for policy, without in (("random", ""), ("cache-aware", "ssd,overlap"))
        for speed in ("1", "2.5")
        for recheck in ("true", "false")
    ]


def test_the_files_in_the_docs_are_right(tmp_path, monkeypatch):
    page = (Path(__file__).parent.parent / "docs" / "sweeps.md").read_text()
    path = tmp_path / "policies.toml"
    path.write_text("\n".join(re.findall(r"```toml\n(.*?)```", page, re.DOTALL)))
    write_trace(tmp_path / "conversation_trace.jsonl")
    monkeypatch.chdir(tmp_path)
    file = read_sweep(path)
    check_flags(file, goodput=False)
    assert file.goodput == GoodputSearch() and len(file.combinations()) == 2 * 4 * 3


def test_a_file_without_axes_is_one_run(tmp_path):
    assert read_sweep(write_sweep(tmp_path)).combinations() == [{}]


def test_what_goodput_means_has_defaults(tmp_path):
    assert read_sweep(write_sweep(tmp_path, "[goodput]\nattainment = 1")).goodput == GoodputSearch(1.0)


@pytest.mark.parametrize(
    ("tables", "problem"),
    [
        ("[axes", "sweep.toml: not TOML ("),
        ("[axis]\nspeed = [1]", "sweep.toml: axis: a sweep has base, axes, cases, goodput and no more"),
        ("[axes]\nspeed = []", "sweep.toml: axes.speed = []: an axis is a list of at least one value"),
        ("[axes]\nspeed = 1", "axes.speed = 1: an axis is a list"),
        ("[axes]\nspeed = [1, 2, 1]", "axes.speed names '1' twice"),
        ("[axes]\nspeed = [1, 1.0]", "sweep.toml: speed=1.0 is the same run as speed=1; keep one of them"),
        ('[[cases]]\nlimit = 2\n[[cases]]\nlimit = "+2"', "limit=+2 is the same run as limit=2"),
        (
            "[axes]\ndram_mib = [99999999999999999]",
            "with dram_mib=99999999999999999: --dram_mib=99999999999999999 on 1",
        ),
        ("[goodput]\nhighest = 1e308", "goodput.highest = 1e+308: use 0.001 to 1000"),
        ("[goodput]\nlowest = 1e-308", "goodput.lowest = 1e-308: use 0.001 to 1000"),
        ("[axes]\nspeed = [{a = 1}]", "axes.speed = {'a': 1}: a flag's value is a text, a number"),
        ("[axes]\nspede = [1]", "sweep.toml: axes.spede: simulate has no such flag; write speed"),
        ("[axes]\nxyz = [1]", "axes.xyz: simulate has no such flag; `mooncake-jax simulate --help` lists them"),
        ('[axes]\nout = ["a"]', "axes.out: a sweep keeps no files of single runs"),
        ("[axes]\nprefill = [1, 2]", "prefill is in base and in axes; keep one"),
        ("[axes]\nspeed = [1, 0]", "sweep.toml with speed=0: --speed=0.0: it must be above 0"),
        ('[axes]\nspeed = ["fast"]', "sweep.toml with speed=fast: "),
        ('[axes]\npolicy = ["random", "best"]', "sweep.toml with policy=best: --policy=best"),
        ("[axes]\nlimit = [1]\n[[cases]]\nlimit = 1", "limit is in axes and in cases; keep one"),
        ("[[cases]]\nlimit = 1\n[[cases]]\nspeed = 1", "cases[1] sets speed and the first case limit"),
        ("[[cases]]\nlimit = 1\n[[cases]]\nlimit = 1", "cases[1] is the same as an earlier case"),
        ("[cases]\nlimit = 1", "cases: write each as a table of its own, [[cases]]"),
        ("[goodput]\nattainment = 90", "goodput.attainment = 90.0: it is a share of requests, at most 1"),
        ("[goodput]\nlowest = 5\nhighest = 4", "goodput.lowest = 5.0: it must be below highest, 4.0"),
        ("[goodput]\ntolerance = 0", "goodput.tolerance = 0: it must be a number above 0"),
        ("[goodput]\ntolerance = 1e-6", "goodput.tolerance = 1e-06: it must be at least 0.001"),
        ("[goodput]\nspeeds = 1", "goodput.speeds: use attainment, lowest, highest, tolerance"),
        ('[axes]\ntrace = ["a.jsonl"]', "trace is in base and in axes"),
    ],
)
def test_bad_files_are_told_in_one_line_before_anything_runs(tmp_path, capsys, tables, problem):
    assert run(["sweep", str(write_sweep(tmp_path, tables)), f"--out={tmp_path / 'out'}"]) == 2
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_costs_are_checked_again_for_as_many_instances_as_a_combination_has(tmp_path, capsys):
    """Copies between 40 instances, as many as there are requests, are predicted soundly, between 100 not."""
    cost, trace = tmp_path / "cost.json", write_trace(tmp_path / "trace.jsonl")
    falling = PolynomialCost((0.0, 1e-3, 0.0), (0.01, 0.0, 0.0), (1.0, 0.0), flow_coefficients=(-0.015, 0.0))
    spread = CostRange(tokens=(1, 100), batch=(1, 4), context=(1, 100), nbytes=(1, 100), flows=(1, 1))
    write_cost_file(cost, CostFile("llama2-70b", None, spread, falling))
    path = tmp_path / "sweep.toml"
    path.write_text(f'[base]\ntrace = "{trace}"\ncost = "{cost}"\n[axes]\ncoupled = [2, 100]\n')
    assert run(["sweep", str(path), f"--out={tmp_path / 'out'}"]) == 2
    error = capsys.readouterr().err
    assert f"sweep.toml with coupled=100: --cost={cost}: predicts -" in error and "for a transfer of" in error


@pytest.mark.parametrize(
    ("base", "tables", "flags", "problem"),
    [
        ("", "", ["--goodput"], "--goodput needs ttft_slo or tbt_slo"),
        ("ttft_slo = 1", "[axes]\nspeed = [1, 2]", ["--goodput"], "axes.speed: --goodput looks for the speed"),
        ("ttft_slo = 1", "[goodput]\nhighest = 5000", ["--goodput"], "goodput.highest = 5000: use 0.001 to 1000"),
        ("", "", ["--out="], "--out= is empty; name what to write to"),
        ("", "", ["--jobs=0"], "--jobs=0: it must be at least 1"),
        ("", "", ["--picture=ttft"], "--picture: there is no figure 'ttft'"),
        ("", "", ["more.toml"], "name one TOML file"),
    ],
)
def test_bad_flags_are_told_in_one_line(tmp_path, capsys, base, tables, flags, problem):
    assert run(["sweep", str(write_sweep(tmp_path, tables, base)), f"--out={tmp_path / 'out'}", *flags]) == 2
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1


def test_a_damaged_trace_is_found_before_anything_runs(tmp_path, capsys):
    path = write_sweep(tmp_path)
    (tmp_path / "trace.jsonl").write_text('{"timestamp": 0}\n')
    assert run(["sweep", str(path), f"--out={tmp_path / 'out'}"]) == 2
    assert "trace.jsonl, line 1: no field input_length" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tables", "other", "goodput", "named"),
    [
        ("[axes]\nspeed = [1, 2]", "[axes]\nspeed = [1, 3]", False, "axes.speed"),
        ("[axes]\nspeed = [1]\nlimit = [1]", "[axes]\nlimit = [1]\nspeed = [1]", False, "the order of the axes"),
        ("[[cases]]\nlimit = 1", "[[cases]]\nlimit = 2", False, "cases"),
        ("", "[axes]\nlimit = [2]", False, "axes.limit"),
        ("", "", True, "goodput"),
    ],
)
def test_results_of_a_changed_file_are_refused(tmp_path, tables, other, goodput, named):
    out = tmp_path / "out"
    claim_folder(out, read_sweep(write_sweep(tmp_path, tables)), False)
    with pytest.raises(UsageError, match=f"holds results of another sweep: {named} is not the same"):
        claim_folder(out, read_sweep(write_sweep(tmp_path, other)), goodput)


def test_a_changed_trace_is_another_sweep_and_a_comment_is_not(tmp_path):
    out, path = tmp_path / "out", write_sweep(tmp_path)
    claim_folder(out, read_sweep(path), False)
    path.write_text("# the same\n" + path.read_text())
    claim_folder(out, read_sweep(path), False)
    trace = Path(json.loads((out / "sweep.json").read_text())["base"]["trace"])
    trace.write_text(trace.read_text().replace("8192", "8191"))
    with pytest.raises(UsageError, match="trace.jsonl is not the same"):
        claim_folder(out, read_sweep(path), False)


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(UsageError, match="holds something else; name another folder"):
        claim_folder(tmp_path / "out", read_sweep(write_sweep(tmp_path)), False)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
