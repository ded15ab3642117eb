"""Elastic roles in virtual time: more requests within their SLOs than any fixed split, and the same run every time."""

import json
import math
import random

import pytest
from simulated import COST, by_id, make_config, make_request, random_requests

from mooncake_jax import metrics
from mooncake_jax.__main__ import run as command
from mooncake_jax.request import SLO
from mooncake_jax.sched.messages import KVCacheLoaded
from mooncake_jax.simulate.run import Stuck, simulate

SLOS = {"ttft_slo": 5.0, "tbt_slo": 0.02}
PHASE_S = 200.0


def shifting(seed):
    """Short prompts with long outputs, which one decoding instance of four cannot keep up with; then long prompts with
    short outputs, for which one prefill instance is too few.
    """
    rng, at, requests = random.Random(seed), 0.0, []
    while (at := at + rng.expovariate(2.0)) < 2 * PHASE_S:
        tokens, output = ((40, 120), (200, 600)) if at < PHASE_S else ((600, 1200), (2, 8))
        requests.append(make_request(len(requests), rng.randrange(*tokens), at, rng.randrange(*output)))
    return requests


def served(requests, prefill, decode, check=False, **changes):
    memory = {"max_batch": 16, "device_kv_tokens": 1 << 16, "dram": 256}
    config = make_config(prefill=prefill, decode=decode, **SLOS | memory | changes)
    run = simulate(config, COST, requests, check=check)
    return run, metrics.summarise(run.outcomes, SLO(5.0, 0.02), run.duration_s)["attained"]


def test_elastic_roles_serve_more_within_slo_than_any_fixed_split():
    requests = shifting(0)
    fixed = {f"{p}P+{4 - p}D": served(requests, p, 4 - p)[1] for p in (3, 2, 1)}
    run, elastic = served(requests, 3, 1, check=True, elastic_roles=True, elastic_after_s=10.0)
    print(f"of {len(requests)} requests within SLO: fixed {fixed}, elastic 3P+1D {elastic}")
    assert elastic > 1.15 * max(fixed.values())
    changes = run.roles["changes"]
    assert run.roles["to_decoding"] >= 2 and run.roles["to_prefill"] >= 1
    assert all(change["at_s"] < 40.0 for change in changes if change["role"] == "decoding")
    assert all(PHASE_S < change["at_s"] for change in changes if change["role"] == "prefill")
    assert sum(run.hardware["decoding_tokens"][node] > 0 for node in ("prefill0", "prefill1", "prefill2")) == 2


def test_fixed_loads_move_nobody_and_change_nothing():
    requests = random_requests(3, 60, rate=4.0)
    fixed, elastic = (
        served(requests, 2, 1, elastic_roles=elastic, elastic_after_s=5.0)[0] for elastic in (False, True)
    )
    assert fixed.roles is None and elastic.roles == {"to_decoding": 0, "to_prefill": 0, "changes": []}
    assert fixed.outcomes == elastic.outcomes


@pytest.mark.parametrize("admission", ["none", "baseline", "slo", "early", "early-predicted", "request-level"])
def test_skipping_steps_changes_nothing_where_roles_change(admission):
    moved = 0
    for seed in range(5):
        rng = random.Random(seed)
        options = {
            "elastic_roles": True,
            "elastic_after_s": 0.1,
            "tbt_slo": rng.choice([0.0135, 0.02]),
            "ttft_slo": 2.0,
            "admission": admission,
            "request_timeout": rng.choice([math.inf, 2.0]),
            "decision_s": rng.choice([0.0, 0.05]),
            "recheck": rng.choice([False, True]),
            "max_batch": 6,
            "ssd": 40,
            "dram": 64,
        }
        requests = random_requests(seed, 40, rate=rng.choice([8.0, 20.0]))
        (skipping, _), (single, _) = (served(requests, 3, 1, **options, single_steps=s) for s in (False, True))
        assert by_id(skipping) == by_id(single)
        assert skipping.roles == single.roles
        moved += skipping.roles["to_decoding"]
    assert moved


@pytest.mark.parametrize("seed", range(3))
def test_one_that_has_moved_inlines_as_others_do(seed):
    rng, at, requests = random.Random(seed), 0.0, []
    for name in range(150):
        at += rng.expovariate(20.0)
        requests.append(make_request(name, rng.randrange(10, 40), at, rng.randrange(100, 300)))
    options = {"elastic_roles": True, "elastic_after_s": 0.5, "inline_prefill": True, "tbt_slo": 0.2, "max_batch": 128}
    (skipping, _), (single, _) = (
        served(requests, 3, 1, True, admission="none", **options, single_steps=s) for s in (False, True)
    )
    assert by_id(skipping) == by_id(single) and skipping.roles == single.roles
    moved = {change["node"] for change in skipping.roles["changes"] if change["role"] == "decoding"}
    inlined = {o.prefill_instance for o in skipping.outcomes if o.prefill_instance == o.decoding_instance}
    assert moved & inlined
    assert {o.status for o in skipping.outcomes} == {"completed"}


class Mute:
    def handle(self, message, now):
        return []


def test_a_run_in_which_nothing_happens_any_more_ends():
    def host(node, actor):
        return Mute() if node.startswith("prefill") else actor

    config = make_config(elastic_roles=True, ttft_slo=9.0, tbt_slo=9.0)
    with pytest.raises(Stuck, match=r"3 requests wait: 2 for prefill0 to take them on \(0, 2\); 1 for prefill1"):
        simulate(config, COST, [make_request(i, 60) for i in range(3)], host=host)


class Deaf(Mute):
    """Decodes, but is never told that KVCache has been loaded."""

    def __init__(self, actor):
        self.actor = actor

    def handle(self, message, now):
        return [] if isinstance(message, KVCacheLoaded) else self.actor.handle(message, now)


def test_who_waits_is_told_of_an_instance_that_has_moved():
    def host(node, actor):
        return Deaf(actor) if node.startswith("prefill") else actor

    memory = {"max_batch": 16, "device_kv_tokens": 1 << 16, "dram": 256}
    config = make_config(prefill=3, elastic_roles=True, elastic_after_s=10.0, **SLOS | memory)
    with pytest.raises(Stuck, match=r"for their KVCache to be loaded at prefill\d"):
        simulate(config, COST, shifting(0)[:100], host=host)


# --- the command


@pytest.fixture
def trace(tmp_path):
    """Long outputs of short prompts."""
    line = {"input_length": 500, "output_length": 4000, "hash_ids": [1]}
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"timestamp": 250 * i, **line}) + "\n" for i in range(400)))
    return path


def test_changes_of_role_are_in_the_summary(trace, tmp_path):
    elastic = ("--elastic_roles", "--elastic_after_s=10", "--ttft_slo=30", "--tbt_slo=0.1", "--cost=fast25")
    out = tmp_path / "out"
    cluster = ("--prefill=3", "--decode=1", "--events")
    assert command(["simulate", f"--trace={trace}", *cluster, *elastic, f"--out={out}"]) == 0
    assert command(["verify-replay", str(out)]) == 0
    summary = json.loads((out / "summary.json").read_text())
    roles, config = summary["roles"], summary["settings"]["config"]
    assert (config["elastic_roles"], config["elastic_after_s"]) == (True, 10.0)
    assert roles["to_decoding"] == len(roles["changes"]) == 2 and roles["to_prefill"] == 0
    assert {change["role"] for change in roles["changes"]} == {"decoding"}
    assert all(change["at_s"] > 10 and change["node"].startswith("prefill") for change in roles["changes"])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--elastic_roles", "--tbt_slo=1"), "--ttft_slo=inf: --elastic_roles measures load by it; give a number"),
        (("--elastic_roles", "--ttft_slo=1"), "--tbt_slo=inf: --elastic_roles measures load by it; give a number"),
        (("--elastic_roles", "--prefill=2x2"), "--prefill=2x2: a pipeline of several stages cannot decode; leave out"),
        (("--elastic_roles", "--coupled=2"), "--elastic_roles=True: coupled instances prefill and decode already"),
        (("--elastic_roles", "--prefill=1"), "--prefill=1: with --elastic_roles one must stay when another decodes"),
        (
            ("--elastic_roles", "--elastic_after_s=1e-9"),
            "--elastic_after_s=1e-09: use a number of seconds, at least 0.1",
        ),
        (("--elastic_after_s=3",), "--elastic_after_s=3.0 says when roles change: give --elastic_roles too"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(trace, tmp_path, capsys, given, told):
    assert command(["simulate", f"--trace={trace}", *given, f"--out={tmp_path / 'out'}"]) == 2
    error = capsys.readouterr().err
    assert told in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()
