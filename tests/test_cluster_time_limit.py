"""Decisions that take too long, and Ctrl-C while one is made."""

import signal
import time

import pytest
from cluster_states import NOW, view_of
from virtual_cluster import make_request
from wrong_policy import Wrong, raising

from mooncake_jax.cluster.time_limit import decision_time
from mooncake_jax.sched.admission import NoAdmission
from mooncake_jax.sched.decisions import Dispatch, Fault, Reject
from mooncake_jax.sched.scheduler import Scheduler


def hangs():
    try:
        while True:
            time.sleep(0.001)
    except Exception:  # a time limit that a policy could catch would be none
        return Reject("caught")


def tries_for_ever():
    while True:
        try:
            raise ValueError
        except BaseException:  # noqa: S110
            pass


def swallows():
    end = time.monotonic() + 0.4
    while time.monotonic() < end:
        try:
            time.sleep(0.4)
        except BaseException:
            continue
    return Dispatch("prefill0", "decode0", 0.0, 0.0)


def stops_the_alarm():
    signal.setitimer(signal.ITIMER_REAL, 0)
    time.sleep(0.3)
    return Dispatch("prefill0", "decode0", 0.0, 0.0)


@pytest.mark.parametrize("slow", [hangs, tries_for_ever, swallows, stops_the_alarm])
def test_a_decision_that_takes_too_long_is_broken_off(slow):
    before = [signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGINT)]
    with decision_time(0.25) as time_limit:
        scheduler = Scheduler(Wrong(slow), NoAdmission(), "mine:Slow", time_limit=time_limit)
        decisions = [scheduler.dispatch(make_request(n, range(40)), view_of([0]), NOW) for n in range(3)]
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0), "no alarm between decisions"
    assert decisions[1] == Fault("policy mine:Slow took longer than 1 s")
    assert isinstance(decisions[0], Dispatch) and isinstance(decisions[2], Dispatch)
    assert [signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGINT)] == before


def test_telling_what_was_wrong_is_under_the_time_limit_too():
    class Slow:
        def __repr__(self):
            time.sleep(10)

    with decision_time(0.05) as time_limit:
        scheduler = Scheduler(Wrong(Slow), NoAdmission(), time_limit=time_limit)
        decision = scheduler.dispatch(make_request(1, range(40)), view_of([0]), NOW)
    assert decision == Fault("policy Wrong took longer than 1 s")


def swallows_an_interrupt():
    try:
        signal.raise_signal(signal.SIGINT)
    except BaseException:
        return Dispatch("prefill0", "decode0", 0.0, 0.0)


@pytest.mark.parametrize("interrupted", [lambda: signal.raise_signal(signal.SIGINT), swallows_an_interrupt])
def test_ctrl_c_ends_the_run_whatever_the_policy_makes_of_it(interrupted):
    with decision_time() as time_limit:
        scheduler = Scheduler(Wrong(interrupted), NoAdmission(), time_limit=time_limit)
        with pytest.raises(KeyboardInterrupt):
            scheduler.dispatch(make_request(1, range(40)), view_of([0]), NOW)
    assert not scheduler.faults


def test_without_a_time_limit_an_interrupt_is_the_users():
    with pytest.raises(KeyboardInterrupt):
        Scheduler(Wrong(raising(KeyboardInterrupt())), NoAdmission()).dispatch(
            make_request(1, range(40)), view_of([0]), NOW
        )
