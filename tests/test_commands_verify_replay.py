"""mooncake-jax verify-replay: no action differs on a real run, whatever is changed shows, and bad input is told."""

import dataclasses
import json
import math
import os
import subprocess
import sys

import pytest
from cluster_run import TINY, prompt, replay, write_prompts
from test_sched_cost_file import COSTS
from virtual_cluster import BLOCK, BYTES_PER_TOKEN, COST, VirtualCluster, make_request

from mooncake_jax.__main__ import run as command
from mooncake_jax.cluster.actors import ActorSettings
from mooncake_jax.cluster.config import ClusterConfig
from mooncake_jax.cluster.record import Recorded
from mooncake_jax.cluster.verify import load_run, verify
from mooncake_jax.request import COMPLETED, REJECTED
from mooncake_jax.sched.serve import serve
from mooncake_jax.simulate.config import SimulationConfig
from mooncake_jax.simulate.settings import SimulatedSettings

CONFIG = ClusterConfig(
    model="none",
    model_dir="none",
    dtype="float32",
    prefill=2,
    stages=1,
    tp=1,
    decode=1,
    prefill_chunk=512,
    block_size=BLOCK,
    dram_mib=1,
    eviction="lru",
    ssd_dir=None,
    ssd_mib=1,
    device_kv_tokens=4096,
    max_batch=8,
    link_gbps=None,
    transport="auto",
    policy="kvcache-centric",
    kvcache_balancing_threshold=math.inf,
    admission="slo",
    decoding_time_s=None,
    cost=None,
    seed=0,
    request_timeout=600.0,
    ttft_slo=2.0,
    tbt_slo=math.inf,
    peak_tflops=None,
    prefill_mfu_floor=None,
    elastic_roles=False,
    elastic_after_s=30.0,
    inline_prefill=False,
)
SETTINGS = ActorSettings(
    CONFIG,
    slots={"prefill0": 64, "prefill1": 64},
    ssd_blocks={"prefill0": 0, "prefill1": 0},
    cost=COST,
    steps={"decode0": COST.step_coefficients},
    bytes_per_token=BYTES_PER_TOKEN,
    stop_ids=(),
)


@pytest.fixture
def recorded(tmp_path):
    """The folder of a run in virtual time, as replay leaves it."""
    lines, actors = [], SETTINGS.actors()
    requests = [make_request(n, [n % 3] * 200 + [9] * n, arrival=0.02 * n) for n in range(20)]
    recording = {node: Recorded(node, actor, lines.append) for node, actor in actors.items()}
    serve(recording, VirtualCluster(actors, requests))
    (tmp_path / "events.jsonl").write_text("".join(line + "\n" for line in lines))
    (tmp_path / "summary.json").write_text(json.dumps({"settings": SETTINGS.to_json(), "events": len(lines)}))
    return tmp_path


def test_settings_survive_json(recorded):
    assert load_run(recorded).settings == SETTINGS


@pytest.mark.parametrize("kind", COSTS)
def test_a_given_cost_model_survives_json_and_is_believed_by_all(tmp_path, kind):
    cost = COSTS[kind]
    given = dataclasses.replace(SETTINGS, cost=cost, steps={})
    (tmp_path / "summary.json").write_text(json.dumps({"settings": given.to_json(), "events": 0}))
    loaded = load_run(tmp_path).settings
    assert loaded == given
    actors = loaded.actors()
    assert actors["conductor"].view.cost == actors["decode0"].cost == cost


def test_a_cost_model_that_lacks_a_field_is_told(recorded, capsys):
    summary = json.loads((recorded / "summary.json").read_text())
    del summary["settings"]["cost"]["step_coefficients"]
    (recorded / "summary.json").write_text(json.dumps(summary))
    assert command(["verify-replay", str(recorded)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "its settings are not this version's (UsageError: cost: lacks 'step_coefficients'" in line


def test_the_same_actions_are_exit_code_0(recorded, capsys):
    assert command(["verify-replay", str(recorded)]) == 0
    events = len((recorded / "events.jsonl").read_text().splitlines())
    assert capsys.readouterr().out == f"{recorded}: {events} events of 4 actors handled again, 0 with other actions\n"


def change(path, line, **fields):
    """Change fields of an event; line counts from 1."""
    lines = path.read_text().splitlines()
    lines[line - 1] = json.dumps(json.loads(lines[line - 1]) | fields)
    path.write_text("".join(line + "\n" for line in lines))


def test_another_action_is_told_with_its_place(recorded, capsys):
    events = [json.loads(line) for line in (recorded / "events.jsonl").open()]
    place = next(n for n, event in enumerate(events, 1) if event["node"] == "prefill0")
    change(recorded / "events.jsonl", place, actions="0" * 16)
    assert command(["verify-replay", str(recorded)]) == 1
    told = capsys.readouterr().out
    now = events[place - 1]["now"]
    assert f"1 with other actions; the first is line {place}: prefill0 on StartPrefill at {now:.6f} s" in told
    assert "now answers RunPrefill" in told


def test_an_actor_that_raises_differs_and_the_rest_is_handled(recorded):
    """The first arrival reaches decode0 instead of Conductor."""
    change(recorded / "events.jsonl", 1, node="decode0")
    verified = verify(recorded / "events.jsonl", SETTINGS.actors())
    assert verified.differences[0].answer == "by raising TypeError: decode0 cannot handle Arrived"
    assert len(verified.differences) > 1, "Conductor never heard of that request"
    assert verified.events == len((recorded / "events.jsonl").read_text().splitlines())


def test_other_settings_show(recorded, capsys):
    summary = json.loads((recorded / "summary.json").read_text())
    summary["settings"]["config"]["ttft_slo"] = 1e-9
    (recorded / "summary.json").write_text(json.dumps(summary))
    assert command(["verify-replay", str(recorded)]) == 1
    assert "line 1: conductor on Arrived at 0.000000 s now answers Report" in capsys.readouterr().out


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


def cut_lines(path):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-3]))


def nested(path):
    """Deeper than any JSON parser goes."""
    path.write_text("[" * 200_000 + "\n")


def damage(**settings):
    def change_settings(path):
        summary = json.loads(path.read_text())
        summary["settings"] |= settings
        path.write_text(json.dumps(summary))

    return change_settings


def damage_config(**fields):
    return damage(config=SETTINGS.to_json()["config"] | fields)


def simulated(**fields):
    """Settings of a simulated run, one of which is another."""
    settings = SimulatedSettings(SimulationConfig(bytes_per_token=1000, layers=4), "llama2-70b", "micro").to_json()
    return damage(**settings | {"config": settings["config"] | fields})


def without_events(path):
    summary = json.loads(path.read_text())
    del summary["events"]
    path.write_text(json.dumps(summary))


@pytest.mark.parametrize(
    ("file", "harm", "told"),
    [
        ("summary.json", lambda path: path.unlink(), "summary.json: No such file or directory; name the results"),
        ("summary.json", cut, "summary.json holds no run's settings; name the results folder"),
        ("summary.json", lambda path: path.write_text("[1]"), "summary.json holds no run's settings"),
        ("summary.json", damage(protocol="0123"), "the run's messages are of another version ('0123', here "),
        ("summary.json", damage(config={"model": "x"}), "its settings are not this version's (TypeError: "),
        ("summary.json", nested, "summary.json holds no run's settings; name the results folder"),
        ("summary.json", damage_config(block_size=0), "no cluster can be made of its settings (ZeroDivisionError: "),
        (
            "summary.json",
            damage_config(eviction="newest"),
            "no cluster can be made of its settings (KeyError: 'newest')",
        ),
        ("summary.json", damage_config(prefill="2"), "not this version's (TypeError: prefill is '2')"),
        ("summary.json", damage_config(elastic_roles=1), "not this version's (TypeError: elastic_roles is 1)"),
        ("summary.json", damage(slots=None), "not this version's (TypeError: slots is None)"),
        (
            "summary.json",
            damage(slots={"prefill0": "64"}),
            "not this version's (TypeError: slots is {'prefill0': '64'})",
        ),
        ("summary.json", damage(steps={"decode0": [1, 2]}), "(TypeError: steps is {'decode0': (1, 2)})"),
        ("summary.json", simulated(kvcache_balancing_threshold="2"), "kvcache_balancing_threshold is '2')"),
        ("summary.json", simulated(without=[1]), "(TypeError: without is frozenset({1}))"),
        ("summary.json", without_events, "not this version's (KeyError: 'events')"),
        ("events.jsonl", lambda path: path.unlink(), "events.jsonl: No such file or directory; the run must have"),
        ("events.jsonl", lambda path: path.write_text(""), "events.jsonl holds no event"),
        ("events.jsonl", cut, "; copy the whole file"),
        ("events.jsonl", cut_lines, " events, its run recorded "),
        ("events.jsonl", nested, "line 1 is no event; restore"),
        ("events.jsonl", lambda path: change(path, 3, now="1.5"), "line 3 is no event; restore"),
        ("events.jsonl", lambda path: change(path, 3, now=None), "line 3 is no event; restore"),
        ("events.jsonl", lambda path: change(path, 3, now=math.nan), "line 3 is no event; restore"),
        ("events.jsonl", lambda path: change(path, 3, node=[]), "line 3 is no event; restore"),
        (
            "events.jsonl",
            lambda path: change(path, 3, message={"type": "Cancel", "dispatch": "1"}),
            "line 3 is no event",
        ),
        ("events.jsonl", lambda path: change(path, 3, node="decode7"), "line 3: the run has no 'decode7'"),
        ("events.jsonl", lambda path: change(path, 3, message={"type": "Request"}), "line 3 is no event; restore"),
        ("events.jsonl", lambda path: path.write_bytes(b"\xff\xfe\n"), "line 1 is no event; restore"),
    ],
)
def test_bad_input_is_told_in_one_line_with_exit_code_2(recorded, capsys, file, harm, told):
    harm(recorded / file)
    assert command(["verify-replay", str(recorded)]) == 2
    error = capsys.readouterr().err
    assert told in error and len(error.splitlines()) == 1
    assert str(recorded) in error


OWN = """
from mooncake_jax.sched.admission import Baseline

class OnArrival(Baseline):
    def on_prefilled(self, request, decoding, view, now):
        return None
"""


@pytest.mark.parametrize("arguments", [[], ["a", "b"]])
def test_one_folder_is_wanted(capsys, arguments):
    assert command(["verify-replay", *arguments]) == 2
    assert "name one folder" in capsys.readouterr().err


def test_a_real_run_with_reuse_migration_and_rejections_is_the_same_again(tmp_path, monkeypatch):
    """A shared prefix, asked for by many at once; the same prompts again; SLOs that nobody meets, judged by anybody's
    admission on arrival and, once all else has been served, by the decoding instance.
    """
    (tmp_path / "own_verified.py").write_text(OWN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    shared = prompt("x", 1000, seed=1)["prompt_ids"]
    prompts = [{"id": "seed", "prompt_ids": shared, "max_tokens": 2, "arrival_s": 0}]
    for i in range(12):
        ids = shared + prompt("x", 400, seed=10 + i)["prompt_ids"]
        prompts.append({"id": f"hot{i}", "prompt_ids": ids, "max_tokens": 2, "arrival_s": 5})
    prompts += [prompt(f"own{i}", 90, seed=30 + i % 4, arrival_s=6) for i in range(12)]
    prompts += [prompt(f"late{i}", 70, seed=40 + i, ttft_slo=1e-9, arrival_s=6) for i in range(4)]
    prompts += [prompt(f"slow{i}", 70, seed=50 + i, tbt_slo=1e-9, arrival_s=12) for i in range(4)]
    path = write_prompts(tmp_path / "prompts.jsonl", prompts)
    flags = ("--prefill_chunk=64", "--admission=own_verified:OnArrival", "--peak_tflops=0.5", "--prefill_mfu_floor=0.9")
    run = replay(tmp_path / "out", TINY, f"--prompts={path}", *flags)
    rows, summary = run.rows(), run.summary()
    assert run.code == 0, run.stderr
    assert len(rows) == 33 and sum(rows[f"hot{i}"]["reused_tokens"] for i in range(12)) >= 12 * 900
    copies = run.messages("BlocksReplicated")
    assert copies and all(message["reason"] is None for message in copies)
    for name, row in rows.items():
        if name.startswith(("late", "slow")):
            assert (row["status"], row["limit"]) == (REJECTED, 1e-9) and row["estimate"] > 1e-9
            assert (row["reused_tokens"] is None) == name.startswith("late"), "rejected after its prefill, or before"
        else:
            assert row["status"] == COMPLETED
    reasons = {"predicted TTFT is above the SLO": 4, "predicted TBT is above the SLO as its KVCache arrives": 4}
    assert summary["reasons"] == {"rejected": reasons, "failed": {}}
    assert summary["faults"] == {} and summary["attained"] == 25
    mfu = summary["prefill_mfu"]
    assert mfu["peak_flops"] == {"prefill0": 0.5e12, "prefill1": 0.5e12} and mfu["floor_met"] is False
    assert mfu["pool"] == pytest.approx(sum(mfu["flops"].values()) / (1e12 * summary["duration_s"]))
    assert "BELOW the floor of 90.0%" in run.stdout
    arguments = [sys.executable, "-m", "mooncake_jax", "verify-replay", str(run.out)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.endswith(f"{len(run.events())} events of 4 actors handled again, 0 with other actions\n")
