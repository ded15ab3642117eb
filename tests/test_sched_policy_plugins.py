"""Anybody's policy and admission: loading them, what they may see, and that they decide the same everywhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_states import NOW, request, view_of
from virtual_cluster import make_actors, make_request, run

from mooncake_jax.errors import UsageError
from mooncake_jax.request import COMPLETED, SLO
from mooncake_jax.sched.admission import NoAdmission
from mooncake_jax.sched.decisions import Dispatch, Fault
from mooncake_jax.sched.messages import CONDUCTOR, Arrived
from mooncake_jax.sched.plugins import ADMISSIONS, POLICIES, load_admission, load_policy
from mooncake_jax.sched.scheduler import Scheduler

OWN = """
from mooncake_jax.sched.admission import Admission
from mooncake_jax.sched.decisions import Dispatch, Reject

class Last:
    def choose(self, request, view, now):
        return Dispatch(list(view.prefill)[-1], next(iter(view.decoding)), 0.0, 0.0)

class NeedsArguments:
    def __init__(self, number): ...
    def choose(self, request, view, now): ...

class TakesTwo:
    def choose(self, request, view): ...

class Short(Admission):
    def on_arrival(self, request, dispatch, view, now):
        return Reject("too long", request.prompt_tokens, 40) if request.prompt_tokens > 40 else None

class OnlyArrival:
    def on_arrival(self, request, dispatch, view, now): ...

class Exits:
    def __init__(self):
        raise SystemExit(7)
    def choose(self, request, view, now): ...

class Static:
    @staticmethod
    def choose(request, view, now):
        return Dispatch("prefill1", "decode0", 0.0, 0.0)

class OfItsClass:
    @classmethod
    def choose(cls, request, view, now):
        return Dispatch("prefill2", "decode0", 0.0, 0.0)

class ByName:
    def choose(self, *, request, view, now): ...

function = len
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module own_policies, and own_broken, which cannot be imported."""
    (tmp_path / "own_policies.py").write_text(OWN)
    (tmp_path / "own_broken.py").write_text("import json\nraise ValueError('not\\ntoday')\n")
    (tmp_path / "own_needs.py").write_text("import a_module_that_is_absent\n")
    (tmp_path / "own_empty.py").write_text("")
    (tmp_path / "own_exits.py").write_text("import sys\nsys.exit(5)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("own_policies", "own_broken", "own_needs", "own_empty", "own_exits"):
        sys.modules.pop(name, None)


def test_own_classes_serve_requests(own):
    scheduler = Scheduler(load_policy("own_policies:Last"), load_admission("own_policies:Short"))
    requests = [make_request("short", range(30)), make_request("long", range(50), arrival=1.0)]
    outcomes = run(make_actors(prefill=3, scheduler=scheduler), requests).outcomes
    assert (outcomes["short"].status, outcomes["short"].prefill_instance) == (COMPLETED, "prefill2")
    assert outcomes["long"].reason == "too long"


@pytest.mark.parametrize(("name", "chosen"), [("Static", "prefill1"), ("OfItsClass", "prefill2")])
def test_a_method_may_do_without_its_object(own, name, chosen):
    scheduler = Scheduler(load_policy(f"own_policies:{name}"), NoAdmission())
    assert scheduler.dispatch(request(), view_of([0, 0, 0]), NOW) == Dispatch(chosen, "decode0", 0.0, 0.0)


def test_a_module_in_the_current_folder_is_found(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    code = (
        "import sys; sys.path.remove(''); from mooncake_jax.sched.plugins import load_policy; load_policy('mine:Last')"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "fastest",
            "--policy=fastest: no policy has this name; use random, round-robin, load-balancing, cache-aware, ",
        ),
        ("own_policies:", "--policy=own_policies:: no policy has this name; use random"),
        (":Last", "--policy=:Last: no policy has this name"),
        (
            "absent.policies:Last",
            "--policy=absent.policies:Last: no module absent.policies; put its folder on PYTHONPATH",
        ),
        ("own_policies.more:Last", "no module own_policies.more"),
        ("own_needs:Last", "--policy=own_needs:Last: own_needs imports a_module_that_is_absent, which is absent"),
        ("own_broken:Last", "--policy=own_broken:Last: importing own_broken raised ValueError: not today"),
        (
            "own_policies:First",
            "--policy=own_policies:First: own_policies has no class First; it has Admission, Dispatch",
        ),
        ("own_policies:function", "own_policies has no class function; it has"),
        ("own_empty:Last", "own_empty has no class Last; it has no class at all"),
        ("own_policies:Short", "Short is no policy: it needs a method choose(request, view, now)"),
        ("own_policies:TakesTwo", "TakesTwo is no policy: it needs a method choose(request, view, now)"),
        ("own_policies:NeedsArguments", "NeedsArguments() raised TypeError"),
        ("own_policies:ByName", "ByName is no policy: it needs a method choose(request, view, now)"),
        ("own_policies:Exits", "Exits() raised SystemExit: 7; it is made without arguments"),
        ("own_exits:Last", "--policy=own_exits:Last: importing own_exits raised SystemExit: 5; mend it"),
    ],
)
def test_a_policy_that_cannot_be_loaded_is_told_in_one_line(own, name, told):
    with pytest.raises(UsageError) as raised:
        load_policy(name)
    assert told in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("strict", "--admission=strict: no admission has this name; use none, baseline, slo, early, early-predicted, "),
        ("own_policies:Last", "Last is no admission: it needs a method on_arrival(request, dispatch, view, now)"),
        ("own_policies:OnlyArrival", "OnlyArrival is no admission: it needs a method on_prefilled(request, decoding, "),
    ],
)
def test_an_admission_that_cannot_be_loaded_is_told_in_one_line(own, name, told):
    with pytest.raises(UsageError) as raised:
        load_admission(name)
    assert told in str(raised.value) and "\n" not in str(raised.value)


# --- output lengths


class Secret:
    """A request whose output length nobody may read."""

    def __init__(self, shown):
        self._shown = shown

    def __getattr__(self, name):
        assert name != "output_length", "a scheduler has looked"
        return getattr(self._shown, name)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("admission", ADMISSIONS)
def test_no_scheduler_sees_an_output_length(policy, admission):
    secret = Secret(request())
    view = view_of([4, 0], [[0.5], []], [[40], []], SLO(ttft=5.0, tbt=1.0))
    scheduler = Scheduler(load_policy(policy), load_admission(admission))
    decision = scheduler.dispatch(secret, view, NOW)
    assert isinstance(decision, Dispatch)
    assert scheduler.prefilled(secret, decision.decoding, view, NOW) is None
    scheduler.completed(secret, 20, 1.0)
    assert not scheduler.faults
    actors = make_actors(scheduler=scheduler)
    assert actors[CONDUCTOR].handle(Arrived(secret), NOW)[0].to.startswith("prefill")


def test_who_asks_for_it_all_the_same_fails():
    class Curious:
        def choose(self, request, view, now):
            return request.output_length

    fault = Scheduler(Curious(), NoAdmission()).dispatch(request(), view_of([0]), NOW)
    assert isinstance(fault, Fault) and "AttributeError" in fault.reason


# --- the same everywhere

DIGEST = """
import random
from virtual_cluster import BLOCK, VirtualCluster, make_actors, make_request
from mooncake_jax.cluster.record import digest
from mooncake_jax.request import SLO
from mooncake_jax.sched.decoding import DecodingLimits
from mooncake_jax.sched.plugins import ADMISSIONS, POLICIES, load_admission, load_policy
from mooncake_jax.sched.scheduler import Scheduler
from mooncake_jax.sched.serve import serve

rng = random.Random(1)
prefixes = [[rng.randrange(1000) for _ in range(480)] for _ in range(2)]
requests = [
    make_request(n, prefix[: rng.randrange(480)] + [n] * rng.randrange(8, 60), 0.04 * n, rng.randrange(9, 99))
    for n, prefix in enumerate(prefixes * 30)
]

def actions(policy, admission):
    scheduler = Scheduler(load_policy(policy), load_admission(admission))
    limits = DecodingLimits(8, 500, BLOCK)
    actors = make_actors(3, 2, slots=90, slo=SLO(0.4, 0.0145), limits=limits, scheduler=scheduler)
    cluster, done = VirtualCluster(actors, requests), []
    class Recorded:
        def __init__(self, actor): self.actor = actor
        def handle(self, message, now):
            answer = self.actor.handle(message, now)
            done.append(digest(answer))
            return answer
    serve({node: Recorded(actor) for node, actor in actors.items()}, cluster)
    assert not scheduler.faults, scheduler.faults
    return digest(done), sorted(o.status for o in cluster.outcomes.values()).count("rejected")

for policy in POLICIES:
    print(policy, *actions(policy, "slo"))
for admission in ADMISSIONS:
    print(admission, *actions("kvcache-centric", admission))
"""


def test_the_same_actions_in_every_process():
    tests = str(Path(__file__).parent)
    printed = []
    for seed in ("0", "1", "31337"):
        path = os.pathsep.join(filter(None, (tests, os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, "-c", DIGEST], capture_output=True, text=True, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[0] == printed[1] == printed[2]
    lines = [line.split() for line in printed[0].splitlines()]
    assert [name for name, *_ in lines] == [*POLICIES, *ADMISSIONS]
    assert len({digest for _, digest, _ in lines}) >= 9, "they decide differently"
    assert all(int(rejected) > 0 for name, _, rejected in lines if name != "none"), printed[0]
