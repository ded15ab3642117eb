"""What anybody's policy and admission may do wrong: it fails the request, with their name, and the cluster goes on."""

import dataclasses
import math
import sys
from fractions import Fraction

import numpy as np
import pytest
from cluster_states import NOW, request, view_of
from virtual_cluster import make_actors, make_request, run
from wrong_policy import Wrong, raising

from mooncake_jax.cluster.time_limit import decision_time
from mooncake_jax.request import COMPLETED, FAILED
from mooncake_jax.sched.admission import Admission, NoAdmission, SLOCheck
from mooncake_jax.sched.decisions import Dispatch, Fault, Reject
from mooncake_jax.sched.kvcache_centric import KVCacheCentric
from mooncake_jax.sched.scheduler import Scheduler


def raises():
    raise KeyError("two\nlines")


class Shy:
    def __repr__(self):
        raise ValueError("do not look")


class ShyError(Exception):
    def __str__(self):
        raise ValueError("do not ask")


class Exiting(Exception):
    def __str__(self):
        sys.exit(4)


class Nameless(Reject):
    def __getattribute__(self, name):
        if name == "reason":
            raise LookupError("no reason")
        return super().__getattribute__(name)


def endless():
    return endless()


WRONG = {
    "raised KeyError: 'two\\nlines'": raises,
    "answered None, neither Dispatch nor Reject": lambda: None,
    "answered 'prefill0', neither Dispatch nor Reject": lambda: "prefill0",
    "chose 'prefill7', which is no prefill instance here": lambda: Dispatch("prefill7", "decode0", 1.0, 0.1),
    "chose 'prefill0', which is no decoding instance here": lambda: Dispatch("prefill0", "prefill0", 1.0, 0.1),
    "copies from 'decode0', which is no prefill": lambda: Dispatch("prefill0", "decode0", 1.0, 0.1, "decode0", 1),
    "copies -1 blocks": lambda: Dispatch("prefill0", "decode0", 1.0, 0.1, "prefill1", -1),
    "predicts a ttft of nan": lambda: Dispatch("prefill0", "decode0", math.nan, 0.1),
    "predicts a tbt of None": lambda: Dispatch("prefill0", "decode0", 1.0, None),
    "rejects with the reason 7, no text": lambda: Reject(7),
    "rejects with an estimate or limit of 'lots', no number": lambda: Reject("busy", "lots"),
    "rejects with an estimate or limit of True, no number": lambda: Reject("busy", 1.0, True),
    "rejects with an estimate or limit of 10000": lambda: Reject("busy", 10**400),
    "rejects with an estimate or limit of a int that cannot be shown": lambda: Reject("busy", 1.0, 10**5000),
    "raised LookupError: no reason": lambda: Nameless("busy"),
    "fails with the reason <object object>, no text": lambda: Fault(object()),
    "chose ['prefill0'], which is no prefill instance here": lambda: Dispatch(["prefill0"], "decode0", 1.0, 0.1),
    "chose {}, which is no decoding instance here": lambda: Dispatch("prefill0", {}, 1.0, 0.1),
    "copies from ['prefill1'], which": lambda: Dispatch("prefill0", "decode0", 1.0, 0.1, ["prefill1"], 1),
    "predicts a ttft of 10000": lambda: Dispatch("prefill0", "decode0", 10**400, 0.1),
    "answered a Shy that cannot be shown, neither": Shy,
    "chose a Shy that cannot be shown, which is no prefill": lambda: Dispatch(Shy(), "decode0", 1.0, 0.1),
    "raised a ShyError that cannot be shown": raising(ShyError()),
    "raised what cannot be shown": raising(Exiting()),
    "raised SystemExit: 3": lambda: sys.exit(3),
    "raised KeyboardInterrupt": raising(KeyboardInterrupt()),
    "raised TypeError: <object object>": lambda: raising(TypeError(object()))(),
    "raised GeneratorExit": raising(GeneratorExit()),
    "raised RecursionError": endless,
    "raised ValueError: \\ud800 and \\x1b[31m": raising(ValueError("\ud800 and \x1b[31m")),
}


@pytest.mark.parametrize("told", WRONG)
def test_a_policy_that_errs_fails_its_request_and_the_cluster_goes_on(told):
    requests = [make_request(number, range(40), arrival=0.1 * number) for number in range(6)]
    with decision_time() as time_limit:
        scheduler = Scheduler(Wrong(WRONG[told]), SLOCheck(), "mine:Wrong", time_limit=time_limit)
        outcomes = run(make_actors(scheduler=scheduler), requests).outcomes
    assert [outcomes[str(n)].status for n in range(6)] == [COMPLETED, FAILED] * 3
    assert outcomes["1"].reason.startswith("policy mine:Wrong ") and told in outcomes["1"].reason
    assert "\n" not in outcomes["1"].reason and len(outcomes["1"].reason) <= 200
    assert sum(scheduler.faults.values()) == 3


@pytest.mark.parametrize("kind", [Reject, Fault])
@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("a\nb" * 500, ("a " + "ba " * 66)[:197] + "..."),
        ("half \ud800", "half \\ud800"),
        ("\x1b[2J über \u202e", "\\x1b[2J über \\u202e"),
    ],
)
def test_a_reason_is_one_line_that_can_be_written(kind, given, written):
    admission = NoAdmission()
    admission.on_arrival = lambda *_: kind(given)
    for scheduler in (Scheduler(Wrong(lambda: kind(given)), NoAdmission()), Scheduler(KVCacheCentric(), admission)):
        decision = scheduler.dispatch(make_request(1, range(40)), view_of([0]), NOW)
        assert decision == kind(written) and decision.reason.encode()


def test_numbers_and_names_of_other_kinds_become_plain_ones():
    name = type("Name", (str,), {"__hash__": lambda self: 7, "__str__": lambda self: "other"})
    answers = iter(
        [
            Dispatch(np.str_("prefill1"), name("decode0"), np.float64(0.5), np.float32(0.25), "prefill0", np.int64(2)),
            Reject(name("busy"), Fraction(1, 2), 7),
        ]
    )
    scheduler = Scheduler(Wrong(lambda: next(answers)), NoAdmission())
    chosen = scheduler.dispatch(make_request(1, range(40)), view_of([0, 0]), NOW)
    assert chosen == Dispatch("prefill1", "decode0", 0.5, 0.25, "prefill0", 2)
    fields = [getattr(chosen, field.name) for field in dataclasses.fields(chosen)]
    assert [type(value) for value in fields] == [str, str, float, float, str, int, bool]
    rejected = scheduler.dispatch(make_request(1, range(40)), view_of([0]), NOW)
    assert rejected == Reject("busy", 0.5, 7) and type(rejected.reason) is str and type(rejected.limit) is int


def cleared(view):
    view.prefill.clear()


def haunted(view):
    view.decoding["ghost"] = view.decoding["decode0"]


def paced(view):
    view.prefill["prefill1"].pace.factor = math.nan


def emptied(view):
    view.decoding["decode0"].context = -1e9


def unreadable(view):
    view.decoding["decode0"].requests = None


def replaced(view):
    view.prefill = {}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (cleared, "raised AttributeError: 'mappingproxy' object has no attribute 'clear'"),
        (haunted, "raised TypeError: 'mappingproxy' object does not support item assignment"),
        (paced, "changed the queue of prefill1 in the view, which it only reads"),
        (emptied, "changed the load of decode0 in the view, which it only reads"),
        (unreadable, "left a view of the cluster that cannot be read: TypeError"),
        (replaced, None),
    ],
)
def test_who_changes_the_view_is_named(change, told):
    class Changing(Admission):
        def choose(self, request, view, now):
            change(view)
            return Dispatch("prefill0", "decode0", 0.0, 0.0)

        def on_arrival(self, request, dispatch, view, now):
            change(view)

    for policy, admission in ((Changing(), NoAdmission()), (KVCacheCentric(), Changing())):
        view = view_of([0, 0])
        decision = Scheduler(policy, admission).dispatch(request(), view, NOW)
        assert isinstance(decision, Fault if told else Dispatch) and (not told or told in decision.reason)
        assert list(view.prefill) == ["prefill0", "prefill1"] and list(view.decoding) == ["decode0"]


def test_an_admission_that_errs_fails_its_request():
    class Arrival(Admission):
        def on_arrival(self, request, dispatch, view, now):
            return True

    class Prefilled(Admission):
        def on_prefilled(self, request, decoding, view, now):
            raise ValueError("why")

    class Completed(Admission):
        def on_completed(self, request, output_tokens, decoding_seconds):
            raise ValueError("why")

    def outcome(admission):
        scheduler = Scheduler(KVCacheCentric(), admission, admission_name="mine")
        return run(make_actors(scheduler=scheduler), [make_request("a", range(40))]).outcomes["a"], scheduler.faults

    first, faults = outcome(Arrival())
    assert (first.status, first.reason) == (FAILED, "admission mine answered True, neither Reject nor None")
    second, faults = outcome(Prefilled())
    assert (second.status, second.reason) == (FAILED, "admission mine raised ValueError: why")
    third, faults = outcome(Completed())
    assert third.status == COMPLETED and faults["admission mine raised ValueError: why"] == 1


def test_a_fault_of_our_own_admission_is_not_put_down_to_the_policy():
    """An SLO that cannot be compared with anything."""
    scheduler = Scheduler(KVCacheCentric(), SLOCheck(), policy_name="theirs", admission_name="ours")
    fault = scheduler.dispatch(dataclasses.replace(request(), ttft_slo="soon"), view_of([0]), NOW)
    assert isinstance(fault, Fault) and fault.reason.startswith("admission ours raised TypeError")


@pytest.mark.parametrize(("lost", "kind"), [("prefill0", "prefill"), ("decode0", "decoding")])
def test_without_instances_the_request_fails_and_no_policy_is_to_blame(lost, kind):
    view = view_of([0])
    view.lost(lost)
    scheduler = Scheduler(Wrong(raises), NoAdmission())
    assert scheduler.dispatch(request(), view, NOW) == Fault(f"no {kind} instance is alive")
    assert not scheduler.faults
