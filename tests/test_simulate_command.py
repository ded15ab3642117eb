"""mooncake-jax simulate: its files, what it prints, and what it refuses."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mooncake_jax.__main__ import run
from mooncake_jax.errors import UsageError
from mooncake_jax.model.architectures import ARCHITECTURES
from mooncake_jax.sched.cost_file import CostFile, CostRange, write_cost_file
from mooncake_jax.sched.profiles import PROFILES, roofline
from mooncake_jax.simulate.traces import keyed_requests
from mooncake_jax.workload.trace import read_trace


@pytest.fixture
def trace(tmp_path):
    """Ten conversations of three turns: each turn has the blocks of the one before, and two more."""
    lines = [
        {
            "timestamp": 1000 * turn + 10 * talk,
            "input_length": 512 * (2 * turn + 2) + 100,
            "output_length": 20,
            "hash_ids": [0, *range(1000 * talk + 1, 1000 * talk + 2 * turn + 3)],
        }
        for turn in range(3)
        for talk in range(10)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def rows(out):
    return [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]


def test_a_trace_leaves_the_files_of_a_replay(trace, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(["simulate", f"--trace={trace}", "--prefill=2", "--decode=1", f"--out={out}"]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["requests"]["completed"] == 30 and summary["tokens"]["output"] == 600
    assert summary["workload"]["trace"] == str(trace) and summary["settings"]["config"]["prefill"] == 2
    assert {row["status"] for row in rows(out)} == {"completed"}
    assert sorted(int(row["id"]) for row in rows(out)) == list(range(30))
    assert any(row["reused_tokens"] for row in rows(out))
    assert not (out / "events.jsonl").exists()
    assert f"results are in {out}" in capsys.readouterr().out


def test_events_are_written_where_they_are_asked_for(trace, tmp_path):
    out = tmp_path / "out"
    assert run(["simulate", f"--trace={trace}", "--limit=3", "--events", "--check", f"--out={out}"]) == 0
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert sum(event["message"]["type"] == "Arrived" for event in events) == 3


def test_what_a_policy_does_wrong_is_told_and_fails_the_run(trace, tmp_path, monkeypatch):
    (tmp_path / "own_simulated.py").write_text(
        "class Raises:\n    def choose(self, request, view, now): raise KeyError\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "out"
    assert run(["simulate", f"--trace={trace}", "--policy=own_simulated:Raises", f"--out={out}"]) == 1
    assert {row["status"] for row in rows(out)} == {"failed"}
    faults = json.loads((out / "summary.json").read_text())["faults"]
    assert faults == {"policy own_simulated:Raises raised KeyError:": 30}


def test_speed_brings_requests_nearer_to_one_another(trace, tmp_path):
    for speed in (1, 4):
        assert run(["simulate", f"--trace={trace}", f"--speed={speed}", f"--out={tmp_path / str(speed)}"]) == 0
    arrivals = {speed: sorted(row["arrival_s"] for row in rows(tmp_path / str(speed))) for speed in (1, 4)}
    assert arrivals[4] == pytest.approx([arrival / 4 for arrival in arrivals[1]])


def test_a_recorded_run_is_the_same_again(trace, tmp_path, capsys):
    out = tmp_path / "out"
    flags = ["--ssd_mib=1000000", "--dram_mib=4000", "--admission=early-predicted", "--tbt_slo=0.05", "--without=ssd"]
    assert run(["simulate", f"--trace={trace}", "--events", *flags, f"--out={out}"]) == 0
    capsys.readouterr()
    assert run(["verify-replay", str(out)]) == 0
    events = len((out / "events.jsonl").read_text().splitlines())
    assert f"{events} events of 17 actors handled again, 0 with other actions" in capsys.readouterr().out
    summary = json.loads((out / "summary.json").read_text())
    summary["settings"]["config"]["tbt_slo"] = 1e-9
    (out / "summary.json").write_text(json.dumps(summary))
    assert run(["verify-replay", str(out)]) == 1
    summary["settings"]["believed_cost"] = "gone.json"
    (out / "summary.json").write_text(json.dumps(summary))
    assert run(["verify-replay", str(out)]) == 2
    assert "cost 'gone.json' is neither a file nor one of" in capsys.readouterr().err


def test_requests_beyond_a_nodes_memory_are_rejected_with_that_reason_and_the_rest_runs(trace, tmp_path):
    out = tmp_path / "out"
    assert run(["simulate", f"--trace={trace}", "--device_kv_tokens=2048", "--dram_mib=200", f"--out={out}"]) == 0
    rejected = {row["reason"] for row in rows(out) if row["status"] == "rejected"}
    assert rejected == {
        f"its {tokens} tokens of KVCache exceed the 2048 that a decoding instance holds" for tokens in (2168, 3192)
    }
    assert sum(row["status"] == "completed" for row in rows(out)) == 10


def test_an_empty_trace_is_one_line(tmp_path, capsys):
    (tmp_path / "trace.jsonl").touch()
    assert run(["simulate", f"--trace={tmp_path / 'trace.jsonl'}", f"--out={tmp_path / 'out'}"]) == 2
    assert "trace.jsonl: the file is empty; it must hold one JSON object a line" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_jax_and_mpi_are_not_needed():
    script = (
        "import sys, mooncake_jax.commands.simulate, mooncake_jax.commands.sweep\n"
        "assert not {'jax', 'flax', 'mpi4py', 'scipy'} & set(sys.modules), sorted(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_python_and_hash_seed_gives_the_same_bytes(trace, tmp_path):
    """Of this Python alone; `scripts/same_bytes.sh` takes as many as there are."""
    script = Path(__file__).parent.parent / "scripts" / "same_bytes.sh"
    flags = [f"--trace={trace}", "--policy=random", "--seed=3"]
    done = subprocess.run(["bash", script, sys.executable, "--", *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "2 runs, 1 content"
    other = ["bash", script, sys.executable, "--", f"--trace={tmp_path / 'gone.jsonl'}"]
    failed = subprocess.run(other, capture_output=True, text=True, check=False)
    assert failed.returncode == 2 and "gone.jsonl: cannot be read" in failed.stderr


def test_large_hash_ids_are_kept_apart(tmp_path):
    lines = [
        {"timestamp": 5000 * place, "input_length": 1024, "output_length": 2, "hash_ids": ids}
        for place, ids in enumerate([[2**32 + 1, 2**63], [1, 0], [2**32 + 1, 2**63]])
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(["simulate", f"--trace={path}", f"--out={tmp_path / 'out'}"]) == 0
    assert [row["reused_tokens"] for row in rows(tmp_path / "out")] == [0, 0, 1023]


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        ([7, 7], "field hash_ids names block 7 twice; correct it"),
        ([10**200, 10**200], f"field hash_ids names block 1{'0' * 56}... twice"),
        ([7, 10**200], f"hash id 1{'0' * 56}... has more than 64 bits"),
        ([7, 2**64], f"hash id {2**64} has more than 64 bits; number the trace's blocks anew"),
    ],
)
def test_hash_ids_that_cannot_be_are_told_with_their_line(tmp_path, capsys, ids, problem):
    path = tmp_path / "trace.jsonl"
    good, bad = ({"timestamp": 0, "input_length": 1024, "output_length": 2, "hash_ids": each} for each in ([1, 2], ids))
    path.write_text(f"{json.dumps(good)}\n\n{json.dumps(bad)}\n")
    assert run(["simulate", f"--trace={path}", f"--out={tmp_path / 'out'}"]) == 2
    assert f"simulate: {path}, line 3: {problem}" in capsys.readouterr().err
    with pytest.raises(UsageError, match=f"^request 1 .counted from 0.: {problem[:12]}"):
        keyed_requests(read_trace(path))


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--prefill=0"], "--prefill=0"),
        (["--speed=0"], "--speed=0.0: it must be above 0"),
        (["--speed=1e-300"], "--speed=1e-300: use 0.001 to 1000"),
        (["--speed=1001"], "--speed=1001: use 0.001 to 1000"),
        (["--speed=nan"], "--speed=nan"),
        (["--prefill=1x81"], "--prefill=1x81: 81 stages cannot share the 80 layers of llama2-70b; use 80 at most"),
        (["--cores=2", "--without=ssd,network"], "--without=ssd,network: with --cores all is as it was measured"),
        (["--model=gpt"], "--model=gpt"),
        (["--cost=none"], "cost 'none' is neither a file nor one of"),
        (["--without=cache"], "there is no part 'cache'"),
        (["--dram_mib=1"], "--dram_mib=1 does not hold one block, 160.0 MiB"),
        (["--dram_mib=99999999999999999"], "--dram_mib=99999999999999999 on 8 prefill instances makes"),
        (["--ssd_mib=1" + "0" * 30], "and at most 33,554,432 can be simulated: lower it"),
        (["--device_kv_tokens=100"], "--device_kv_tokens=100"),
        (["--policy=best"], "--policy=best"),
        (["--coupled=-1"], "--coupled=-1: use 0 to 9999 instances"),
        (["--coupled=2", "--prefill=2"], "--prefill=2: --coupled=2 instances have no such part; leave it out"),
        (["--coupled=2", "--decode=8"], "--decode=8: --coupled=2"),
        (["--coupled=2", "--eviction=lfu"], "--eviction=lfu: --coupled=2 instances have no such part; leave it out"),
        (["--coupled=2", "--without=overlap,ssd"], "--without=overlap,ssd: --coupled=2 instances have no such part"),
        (["--coupled=2", "--policy=kvcache-centric"], "--policy=kvcache-centric: coupled instances share no KVCache"),
        (["--coupled_mode=plain"], "--coupled_mode=plain: it is for --coupled=N; leave it out"),
        (["--coupled=2", "--token_budget=0"], "--token_budget=0: it must be at least 1"),
        (["--drop_over=0"], "--drop_over=0: it must be at least 1"),
        (["--cores=0"], "--cores=0.0: it must be above 0"),
        (["--cores=2"], "--cores=2 needs --cost=FILE of `mooncake-jax profile`, not micro"),
        (["--cores=2", "--prefill=1x2"], "--cores=2 is for prefill instances of one stage"),
        (["--policy=adaptive", "--kvcache_balancing_threshold=inf"], "threshold=inf: --policy=adaptive begins with it"),
        (["--policy=random", "--kvcache_balancing_threshold=3"], "threshold=3.0: --policy=random has no use for it"),
        (["--coupled=2", "--kvcache_balancing_threshold=3"], "threshold=3.0: --coupled=2 instances have no such part"),
        (
            ["--coupled=2", "--prefill_mfu_floor=0.3"],
            "--prefill_mfu_floor=0.3: --coupled=2 instances have no such part",
        ),
        (["--prefill_mfu_floor=1.5"], "--prefill_mfu_floor=1.5: a share of the peak is above 0, at most 1"),
        (["--peak_tflops=0"], "--peak_tflops=0.0: use more than 0"),
        (["--peak_tflops=1e308"], "--peak_tflops=1e+308: use more than 0, at most 1e+09"),
        (["--decision_s=1e308"], "--decision_s=1e+308: use 0 to 3600 seconds"),
        (["--decision_s=-1"], "--decision_s=-1.0: use 0 to 3600 seconds"),
        (["--decode=10000"], "--decode=10000: use 1 to 9999 instances"),
        (["--decode=0"], "--decode=0: use 1 to 9999 instances"),
        (["--coupled=1000000000"], "--coupled=1000000000: use 0 to 9999 instances"),
        (["--decoding_time_s=3"], "--decoding_time_s=3.0: --admission=slo has no use for it; leave it out, or give"),
        (["--out="], "--out= is empty; name what to write to, or leave it out"),
        (["extra"], "'extra' is no flag"),
    ],
)
def test_bad_input_is_one_line(trace, tmp_path, capsys, flags, problem):
    assert run(["simulate", f"--trace={trace}", f"--out={tmp_path / 'out'}", *flags]) == 2
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_prefill_pools_mfu_is_told_and_held_against_its_floor(trace, tmp_path, capsys):
    """Two pipelines of two nodes of eight A800, by hand; where a prompt has no reuse it takes 2 FLOPs a weight."""
    out, flags = tmp_path / "out", [f"--trace={trace}", "--prefill=2x2", "--decode=2", "--prefill_mfu_floor=0.9"]
    assert run(["simulate", *flags, f"--out={out}"]) == 0
    summary = json.loads((out / "summary.json").read_text())
    mfu = summary["prefill_mfu"]
    assert mfu["peak_flops"] == dict.fromkeys(("prefill0", "prefill1"), 2 * 8 * 312e12)
    flops = sum(mfu["flops"].values())
    assert mfu["pool"] == pytest.approx(flops / (4 * 8 * 312e12 * summary["duration_s"]))
    tokens = sum(row["prompt_tokens"] - row["reused_tokens"] for row in rows(out))
    assert flops == pytest.approx(2 * 68.45e9 * tokens, rel=0.05)
    assert 0 < mfu["pool"] < 0.9 and (mfu["floor"], mfu["floor_met"]) == (0.9, False)
    assert "BELOW the floor of 90.0%" in capsys.readouterr().out


def test_a_peak_is_taken_from_the_costs_or_given_and_a_floor_needs_one(trace, tmp_path, capsys):
    path, spread = tmp_path / "cost.json", CostRange((1, 100), (1, 4), (1, 100), (1, 100), (1, 1))
    two = ["simulate", f"--trace={trace}", "--limit=3", f"--cost={path}"]

    def peak(name, cost, *flags):
        write_cost_file(path, CostFile("llama2-70b", None, spread, cost))
        assert run([*two, *flags, f"--out={tmp_path / name}"]) == 0
        mfu = json.loads((tmp_path / name / "summary.json").read_text())["prefill_mfu"]
        return mfu and mfu["peak_flops"]["prefill0"]

    assert peak("roofline", roofline(ARCHITECTURES["llama2-70b"], "h100", 4)) == 4 * 989e12
    assert peak("given", PROFILES["micro"], "--peak_tflops=2.5") == 2.5e12
    assert peak("unknown", PROFILES["micro"]) is None
    assert run([*two, "--prefill_mfu_floor=0.3", f"--out={tmp_path / 'floor'}"]) == 2
    assert f"is a share of a peak, which --cost={path} does not say" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["cost", "believed_cost"])
def test_costs_that_turn_negative_where_they_are_used_are_refused(trace, tmp_path, capsys, flag):
    """Within the range that they vouch for they are sound: 1e-7 s less for each token of context."""
    micro = PROFILES["micro"]
    falling = replace(micro, step_coefficients=(1e-3, 0.0, -1e-7))
    spread = CostRange(tokens=(1, 100), batch=(1, 4), context=(1, 100), nbytes=(1, 100), flows=(1, 1))
    path, out = tmp_path / "cost.json", tmp_path / "out"
    write_cost_file(path, CostFile("llama2-70b", None, spread, falling))
    assert run(["simulate", f"--trace={trace}", f"--{flag}={path}", f"--out={out}"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"--{flag}={path}: predicts -" in line and "for a step of 1 requests with" in line
    assert not out.exists()
    write_cost_file(path, CostFile("llama2-70b", None, spread, replace(micro, flow_coefficients=(0.0, -1e-9))))
    assert run(["simulate", f"--trace={trace}", f"--{flag}={path}", f"--out={out}"]) == 2
    assert "for a transfer of" in capsys.readouterr().err


def test_a_trace_is_needed(capsys):
    assert run(["simulate"]) == 2
    assert "--trace is missing" in capsys.readouterr().err


def test_coupled_instances_by_their_flags(trace, tmp_path):
    for mode in ("plain", "prefix_cache"):
        out = tmp_path / mode
        flags = [
            f"--trace={trace}",
            "--coupled=2",
            f"--coupled_mode={mode}",
            "--cost=vllm",
            "--drop_over=3000",
            "--events",
        ]
        assert run(["simulate", *flags, f"--out={out}"]) == 0
        summary = json.loads((out / "summary.json").read_text())
        config = summary["settings"]["config"]
        assert (config["coupled"], config["policy"], config["coupled_mode"]) == (2, "load-balancing", mode)
        assert summary["requests"]["completed"] == 20
        assert summary["reasons"]["rejected"] == {"the prompt has more than 3000 tokens": 10}
        assert summary["hardware"]["prefill_compute_s_mean"] > 0
        assert (summary["reuse_share"] > 0) == (mode == "prefix_cache")
        assert run(["verify-replay", str(out)]) == 0


def test_a_policy_that_never_answers_fails_its_request(trace, tmp_path, monkeypatch):
    (tmp_path / "own_endless.py").write_text(
        "from mooncake_jax.sched.policies import LoadBalancing\n"
        "class Endless(LoadBalancing):\n"
        "    def choose(self, request, view, now):\n"
        "        while request.id == '1': pass\n"
        "        return super().choose(request, view, now)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "out"
    assert run(["simulate", f"--trace={trace}", "--limit=3", "--policy=own_endless:Endless", f"--out={out}"]) == 1
    reasons = {row["id"]: row["reason"] for row in rows(out)}
    assert reasons == {"0": None, "1": "policy own_endless:Endless took longer than 1 s", "2": None}
