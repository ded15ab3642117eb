"""Anybody's policy and admission on a real cluster of MPI ranks: they serve, they err, and the run can be replayed."""

import os

import pytest
from cluster_run import TINY, prompt, replay, replayed_differences, write_prompts

from mooncake_jax.cluster.actors import ActorSettings
from mooncake_jax.cluster.time_limit import decision_time
from mooncake_jax.request import COMPLETED, FAILED, REJECTED

OWN = """
import time
from mooncake_jax.sched.admission import Admission
from mooncake_jax.sched.decisions import Dispatch, Reject
from mooncake_jax.sched.placement import dispatch_to

class Second:
    def choose(self, request, view, now):
        if request.prompt_tokens == 50:
            raise ValueError("fifty")
        if request.prompt_tokens == 60:
            time.sleep(1.5)
        if request.prompt_tokens == 55:
            raise KeyboardInterrupt
        if request.prompt_tokens == 70:
            return Dispatch("prefill7", "decode0", 0.0, 0.0)
        return dispatch_to(list(view.prefill)[1], request, view, now)

class Important(Admission):
    def on_arrival(self, request, dispatch, view, now):
        return None if request.priority >= 5 else Reject(f"priority {request.priority} is below 5", request.priority, 5)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_cluster_policies.py").write_text(OWN)
    paths = (str(tmp_path), os.environ.get("PYTHONPATH"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))  # of the ranks
    monkeypatch.syspath_prepend(str(tmp_path))  # of the actors made here


def test_own_policy_and_admission_on_real_ranks(own, tmp_path):
    lengths = {"a": 40, "raises": 50, "interrupts": 55, "sleeps": 60, "errs": 70, "b": 40, "unimportant": 40}
    prompts = [prompt(name, tokens, priority=9, arrival_s=0) for name, tokens in lengths.items()]
    prompts[-1]["priority"] = 4
    path = write_prompts(tmp_path / "prompts.jsonl", prompts)
    names = ("--policy=own_cluster_policies:Second", "--admission=own_cluster_policies:Important")
    run = replay(tmp_path / "out", TINY, f"--prompts={path}", *names)
    rows = run.rows()
    assert [rows[name]["status"] for name in lengths] == [COMPLETED, *[FAILED] * 4, COMPLETED, REJECTED]
    assert rows["a"]["prefill_instance"] == rows["b"]["prefill_instance"] == "prefill1"
    assert rows["raises"]["reason"] == "policy own_cluster_policies:Second raised ValueError: fifty"
    assert rows["interrupts"]["reason"] == "policy own_cluster_policies:Second raised KeyboardInterrupt"
    assert rows["sleeps"]["reason"] == "policy own_cluster_policies:Second took longer than 1 s"
    told = "policy own_cluster_policies:Second chose 'prefill7', which is no prefill instance here"
    assert rows["errs"]["reason"] == told and run.code == 1
    assert rows["unimportant"]["reason"] == "priority 4 is below 5"
    settings = ActorSettings.from_json(run.summary()["settings"])
    with decision_time() as time_limit:
        assert replayed_differences(run, settings.actors(time_limit)) == []


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--policy=fastest", "--policy=fastest: no policy has this name"),
        ("--admission=own_cluster_policies:Second", "Second is no admission: it needs a method on_arrival("),
        ("--kvcache_balancing_threshold=0.5", "--kvcache_balancing_threshold=0.5: it must be at least 1"),
        ("--decoding_time_s=0", "--decoding_time_s=0.0: it must be above 0 seconds"),
    ],
)
def test_what_cannot_be_loaded_is_told_before_any_rank_starts(own, tmp_path, flag, told):
    run = replay(tmp_path / "out", TINY, flag)
    assert run.code == 2 and told in run.stderr and len(run.stderr.splitlines()) == 1
    assert "starting" not in run.stdout
