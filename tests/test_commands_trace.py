"""`mooncake-jax trace`, as a user calls it."""

import importlib.util
import json

import pytest

from mooncake_jax.__main__ import run
from mooncake_jax.commands import simulate, trace
from mooncake_jax.workload.azure import read_azure
from mooncake_jax.workload.released import RELEASED, Released
from mooncake_jax.workload.statistics import reuse
from mooncake_jax.workload.trace import read_sourced, read_trace


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """Flags of one run are not those of the next; files lie in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    yield
    for flags in (trace.FLAGS, simulate.FLAGS):
        flags.unparse_flags()
        for name in flags:
            flags[name].unparse()


@pytest.fixture
def small(tmp_path):
    """Three requests: the second has the first's two blocks, the third comes too early and has only the first."""
    lines = [
        {"timestamp": 0, "input_length": 1024, "output_length": 10, "hash_ids": [7, 8]},
        {"timestamp": 4000, "input_length": 1500, "output_length": 20, "hash_ids": [7, 8, 2**63]},
        {"timestamp": 2000, "input_length": 600, "output_length": 30, "hash_ids": [7, 9]},
    ]
    path = tmp_path / "small.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def fails(capsys, *arguments):
    """The one line on stderr of a command that is refused."""
    assert run(["trace", *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("mooncake-jax trace: ")
    return error


def test_stats_in_figures_and_pictures(small, capsys):
    assert run(["trace", "stats", str(small), "--policies=lru,optimal", "--capacities=1,inf"]) == 0
    told = capsys.readouterr()
    assert "1 of 3 rows were out of order in time; sorted" in told.err
    text = " ".join(told.out.split())
    assert "3 requests in 4 s, 0.75 requests/s" in text
    assert "tokens mean P50 P90 P99 least most input 1,041.3 1,024 1,405 1,490 600 1,500 output 20.0" in text
    assert "reuse in a pool without limits: 42.86% of blocks" in text
    assert "7 block references, 4 distinct blocks; 49.17% of prompt tokens" in text  # 512 and 1024 of 3124
    assert "hash id 7 8" in text and "uses 3 2 1 1" in text and "share of requests 100.0% 66.7%" in text
    assert str(2**63) in text
    assert "hit rate at blocks 1 inf" in text and "lru 28.57% 42.86%" in text
    assert told.out.count("#") > 100 and "arrivals over time" in text


def test_stats_of_lengths_alone(capsys):
    with open("azure.csv", "w") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n")
    assert run(["trace", "stats", "azure.csv"]) == 0
    out = capsys.readouterr().out
    assert "1 requests in 0 s" in out and "4,808" in out and "no hash ids" in out


def test_stats_draw_where_matplotlib_is(small, capsys):
    if importlib.util.find_spec("matplotlib") is None:
        assert "matplotlib is not installed" in fails(capsys, "stats", str(small), "--plot=stats.png")
        return
    assert run(["trace", "stats", str(small), "--policies=lru", "--plot=stats.png"]) == 0
    with open("stats.png", "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"
    assert "--plot=nowhere/stats.png: its folder" in fails(capsys, "stats", str(small), "--plot=nowhere/stats.png")
    capsys.readouterr()
    for name in ("stats.what", "stats"):
        assert run(["trace", "stats", str(small), f"--plot={name}"]) == 2
        told = capsys.readouterr()
        assert f"--plot={name}: no picture's name ends so; use one of ." in told.err and not told.out


def test_a_surrogate_says_so_wherever_it_is_used(capsys):
    assert run(["trace", "generate", "surrogate-report", "--requests=60", "--seed=3"]) == 0
    assert "SURROGATE of the report's trace" in capsys.readouterr().out
    rows, source = read_sourced("surrogate-report.jsonl")
    assert len(rows) == 60 and source.startswith("SURROGATE")
    assert source.endswith("; 60 requests: it fits those figures at 23,608 only")
    assert run(["trace", "stats", "surrogate-report.jsonl", "--policies=lru"]) == 0
    assert "SURROGATE" in capsys.readouterr().out
    assert run(["simulate", "--trace=surrogate-report.jsonl", "--out=run"]) == 0
    assert "surrogate-report.jsonl: SURROGATE" in capsys.readouterr().err
    with open("run/summary.json") as file:
        assert json.load(file)["workload"]["source"] == source
    for arguments in (
        ("generate", "surrogate-report", "--out=x.jsonl"),
        ("convert", "surrogate-report.jsonl", "x.csv"),
    ):
        assert "put 'surrogate' into its name" in fails(capsys, *arguments)


def test_poisson_workloads(capsys):
    assert run(["trace", "generate", "simulated-16k", "--requests=50", "--rate=0.5", "--out=x.jsonl"]) == 0
    assert "x.jsonl: 50 requests; simulated-16k: Poisson at 0.5 requests/s, seed 0" in capsys.readouterr().out
    assert {row.input_length for row in read_trace("x.jsonl")} == {16_384}
    assert "--rate=0.0: must be" in fails(capsys, "generate", "l-eval", "--rate=0")
    assert "there is no such trace; use one of arxiv-summarization, l-eval" in fails(capsys, "generate", "x")


def test_convert_there_and_back(small, capsys):
    assert run(["trace", "convert", str(small), "lengths.csv"]) == 0
    assert "without the hash ids" in capsys.readouterr().out
    assert [row.timestamp for row in read_azure("lengths.csv")] == [0, 2000, 4000]
    assert run(["trace", "convert", "lengths.csv", "again.jsonl"]) == 0
    rows, source = read_sourced("again.jsonl")
    assert source == "lengths of lengths.csv; no reuse: every block has an id of its own"
    assert [row.input_length for row in rows] == [1024, 600, 1500] and reuse(rows).distinct == 7


def test_convert_names_the_reuse_that_it_makes_up(capsys):
    assert run(["trace", "generate", "arxiv-summarization", "--requests=400", "--out=a.jsonl"]) == 0
    assert run(["trace", "convert", "a.jsonl", "a.csv"]) == 0
    assert run(["trace", "convert", "a.csv", "b.jsonl", "--reuse=0.4", "--seed=2"]) == 0
    assert "made-up reuse of 0.4: contexts of 20 prompts, 16 at a time, seed 2" in capsys.readouterr().out
    rows, source = read_sourced("b.jsonl")
    assert "made-up reuse of 0.4" in source and reuse(rows).block_share == pytest.approx(0.4, abs=0.01)


def test_convert_refuses(small, capsys):
    assert run(["trace", "convert", str(small), "small.csv"]) == 0
    assert "one must be Azure's .csv" in fails(capsys, "convert", str(small), "b.jsonl")
    assert "trace convert IN OUT: got a.csv" in fails(capsys, "convert", "a.csv")
    assert "a.csv: cannot be read" in fails(capsys, "convert", "a.csv", "b.jsonl")
    assert "cannot be written" in fails(capsys, "convert", str(small), "nowhere/b.csv")
    assert "--seed=-1: must be" in fails(capsys, "convert", "small.csv", "b.jsonl", "--seed=-1")
    assert "--reuse=0.5: a .csv has no place" in fails(capsys, "convert", str(small), "b.csv", "--reuse=0.5")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("stats", "SMALL", "--rate=-3"), "--rate=-3.0: trace stats has no use for it; leave it out"),
        (("stats", "SMALL", "--seed=-5"), "--seed=-5: trace stats"),
        (("stats", "SMALL", "--dir="), "--dir=: trace stats"),
        (("get", "conversation", "--policies=lru,lfu"), "--policies=lru,lfu: trace get"),
        (("get", "conversation", "--dir="), "--dir= is empty"),
        (("generate", "l-eval", "--reuse=0.5"), "--reuse=0.5: trace generate"),
        (("generate", "l-eval", "--out="), "--out= is empty; name what to write to, or leave it out"),
        (("convert", "SMALL", "b.csv", "--out=c.csv"), "--out=c.csv: trace convert"),
        (("convert", "SMALL", "b.csv", "--seed=1"), "--seed=1: a .csv has no place for it"),
    ],
)
def test_flags_that_an_action_has_no_use_for_are_refused(small, capsys, arguments, told):
    error = fails(capsys, *(str(small) if argument == "SMALL" else argument for argument in arguments))
    assert error.startswith(f"mooncake-jax trace: {told}")


def test_get_tells_what_failed(monkeypatch, capsys):
    monkeypatch.setitem(RELEASED, "absent", Released("http://127.0.0.1:9/absent.jsonl", "nobody listens there"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    error = fails(capsys, "get", "absent", "--dir=kept")
    assert "127.0.0.1:9/absent.jsonl: cannot be downloaded" in error and "bring the file" in error
    assert "trace get: name one or more of conversation, synthetic" in fails(capsys, "get")
    assert "trace get other: there is no such trace" in fails(capsys, "get", "other")


def test_get_goes_on_after_one_that_failed(monkeypatch, tmp_path, capsys):
    kept = tmp_path / "traces" / "kept.jsonl"
    kept.parent.mkdir()
    kept.write_text("whole")
    monkeypatch.setitem(RELEASED, "absent", Released("http://127.0.0.1:9/absent.jsonl", "nobody listens there"))
    monkeypatch.setitem(RELEASED, "kept", Released("http://127.0.0.1:9/kept.jsonl", "is there"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert run(["trace", "get", "absent", "kept", "absent"]) == 2
    told = capsys.readouterr()
    assert told.out.startswith("traces/kept.jsonl  SHA-256 ") and told.out.count("\n") == 1
    assert (
        told.err.count("absent.jsonl: cannot be downloaded") == 2 and "getting http://127.0.0.1:9/kept" not in told.err
    )


def test_too_many_requests_are_refused_at_once(capsys):
    for name in ("l-eval", "surrogate-report"):
        error = fails(capsys, "generate", name, "--requests=10000000000")
        assert "--requests=10000000000: must be an integer from 1 to 1,000,000" in error


def test_times_of_a_short_trace_are_told_apart(capsys):
    with open("short.jsonl", "w") as file:
        for timestamp in range(0, 5000, 250):
            row = {"timestamp": timestamp, "input_length": 10, "output_length": 1, "hash_ids": [1]}
            file.write(json.dumps(row) + "\n")
    assert run(["trace", "stats", "short.jsonl"]) == 0
    out = capsys.readouterr().out
    assert "20 requests in 4.75 s" in out
    times = [line.split()[0] for line in out.partition("arrivals over time")[2].splitlines()[1:]]
    assert times[:3] == ["0.00", "0.24", "0.47"] and len(set(times)) == len(times) == 20


def test_stats_compare_policies_where_they_are_asked_to(small, capsys):
    assert run(["trace", "stats", str(small)]) == 0
    out = capsys.readouterr().out
    assert "lru " in out and "sieve" not in out


def test_convert_refuses_times_beyond_azures_format(capsys):
    with open("late.jsonl", "w") as file:
        file.write('{"timestamp": 9e15, "input_length": 10, "output_length": 1, "hash_ids": [1]}\n')
    error = fails(capsys, "convert", "late.jsonl", "z.csv")
    assert "z.csv: cannot be written: timestamp 9000000000000000.0 of request 0 (counted from 0) lies beyond" in error


def test_actions_are_named(capsys):
    assert "say what to do, one of stats, get, generate, convert" in fails(capsys)
    assert "trace x: say what to do" in fails(capsys, "x")
    assert "trace stats FILE: got no name" in fails(capsys, "stats")


def test_empty_traces_are_refused(tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "empty.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    assert "empty.jsonl: the file is empty" in fails(capsys, "stats", "empty.jsonl")
    assert "empty.csv: the trace is empty" in fails(capsys, "stats", "empty.csv")
