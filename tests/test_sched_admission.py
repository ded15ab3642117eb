"""Admissions by worked cases: what is judged, when, against which SLO, and for whom first."""

import dataclasses
import math

import pytest
from cluster_states import NOW, ExactCost, request, view_of
from virtual_cluster import BLOCK, COST, make_actors, make_request, run

from mooncake_jax.request import COMPLETED, REJECTED, SLO
from mooncake_jax.sched.admission import Baseline, NoAdmission, SLOCheck
from mooncake_jax.sched.decisions import Reject
from mooncake_jax.sched.decoding import DecodingLimits
from mooncake_jax.sched.kvcache_centric import KVCacheCentric
from mooncake_jax.sched.output_lengths import OutputLengths
from mooncake_jax.sched.plugins import ADMISSIONS, load_admission
from mooncake_jax.sched.predicted_admission import EarlyRejection, PredictedEarlyRejection, RequestLevelPrediction
from mooncake_jax.sched.scheduler import Scheduler
from mooncake_jax.sched.view import RequestView

STEP = ExactCost().step


def asked(**fields):
    """64 tokens: a prefill of 1 s."""
    return RequestView.of(request(4, **fields))


def judged(admission, view, asked=asked()):
    """What it says on arrival of what algorithm 1 chooses."""
    return admission.on_arrival(asked, KVCacheCentric().choose(asked, view, NOW), view, NOW)


def add(view, number, prompt_tokens, ready, node="decode0", tbt_slo=math.inf):
    """A request in prefill until `ready`."""
    view.decoding[node].add(number, prompt_tokens, ready, tbt_slo)


def test_none_serves_all():
    assert judged(NoAdmission(), view_of([0], [[9.0]], slo=SLO(0.001, 0.001))) is None


@pytest.mark.parametrize("name", [name for name in ADMISSIONS if name != "none"])
def test_all_others_reject_a_late_first_token_with_the_estimate(name):
    at_limit, above = view_of([0], [[2.0]], slo=SLO(ttft=3.0)), view_of([0], [[2.25]], slo=SLO(ttft=3.0))
    assert judged(load_admission(name), at_limit) is None
    assert judged(load_admission(name), above) == Reject("predicted TTFT is above the SLO", 3.25, 3.0)


@pytest.mark.parametrize("name", [name for name in ADMISSIONS if name not in ("none", "baseline")])
def test_those_that_are_early_reject_slow_decoding_on_arrival(name):
    tbt = STEP(3, 32 + 64)  # with two requests of 16 tokens
    at_limit, above = (view_of([0], decoding=[[16, 16]], slo=SLO(tbt=slo)) for slo in (tbt, tbt - 2**-10))
    assert judged(load_admission(name), at_limit) is None
    assert judged(load_admission(name), above) == Reject("predicted TBT is above the SLO", tbt, tbt - 2**-10)


def test_baseline_judges_decoding_when_the_prefill_is_done():
    view = view_of([0], decoding=[[16]], slo=SLO(tbt=STEP(2, 80)))
    add(view, 70, 64, NOW + 9)  # still in prefill: does not count yet
    assert judged(Baseline(), view) is None
    add(view, 71, 64, NOW)
    view.decoding["decode0"].prefilled(71, NOW)
    assert Baseline().on_prefilled(asked(), "decode0", view, NOW) is None, "two: it and the one of 16 tokens"
    view.decoding["decode0"].prefilled(70, NOW)
    reject = Baseline().on_prefilled(asked(), "decode0", view, NOW)
    assert reject.estimate == STEP(3, 16 + 64 + 64) > reject.limit == STEP(2, 80)


def test_baseline_wastes_a_prefill_where_slo_does_not():
    def outcomes(admission):
        limits = DecodingLimits(16, 1000, BLOCK)
        scheduler = Scheduler(KVCacheCentric(), admission)
        actors = make_actors(prefill=3, slo=SLO(tbt=COST.step(2, 300)), limits=limits, scheduler=scheduler)
        return run(actors, [make_request(n, [n] * 100, 0.001 * n, output_length=80) for n in range(3)]).outcomes

    for admission, prefilled in ((Baseline(), 0), (SLOCheck(), None)):
        ended = outcomes(admission)
        assert sorted(o.status for o in ended.values()) == [COMPLETED, COMPLETED, REJECTED]
        [rejected] = [o for o in ended.values() if o.status == REJECTED]
        assert "predicted TBT" in rejected.reason and rejected.reused_tokens == prefilled


def test_early_rejection_looks_at_the_pool_as_it_is():
    """The mean of the pool; requests in prefill do not count, which is why the loads swing."""
    view = view_of([0], decoding=[[16], [16] * 3], slo=SLO(tbt=(STEP(2, 80) + STEP(3, 48)) / 2))
    assert judged(EarlyRejection(), view) is None
    add(view, 70, 16, NOW - 1, node="decode1")
    assert judged(EarlyRejection(), view) is None
    view.decoding["decode1"].prefilled(70, NOW)
    assert judged(EarlyRejection(), view).estimate == (STEP(2, 80) + STEP(4, 64)) / 2


def test_prediction_looks_at_the_pool_when_the_prefill_will_be_done():
    """Its prefill ends in 1 s. t_d is 3 s."""
    view = view_of([0], slo=SLO(tbt=0.0))
    for number, ready in enumerate((NOW - 2.0, NOW - 1.0, NOW + 0.5, NOW + 1.5)):  # the first leaves, the last is late
        add(view, number, 16, ready)
    assert judged(PredictedEarlyRejection(3.0), view).estimate == STEP(3, 32 + 64)
    assert judged(PredictedEarlyRejection(0.25), view).estimate == STEP(1, 64)
    assert judged(PredictedEarlyRejection(), view).estimate == STEP(4, 48 + 64), "nothing is known: nobody leaves"


def test_prediction_counts_what_has_been_decoded_so_far_and_no_step_where_nobody_is():
    view = view_of([0], decoding=[[], []], slo=SLO(tbt=0.0))
    assert judged(PredictedEarlyRejection(9.0), view).estimate == (STEP(1, 64) + 0.0) / 2
    add(view, 1, 16, NOW, node="decode1")
    view.decoding["decode1"].tokens([1], NOW, 100)
    assert judged(PredictedEarlyRejection(9.0), view).estimate == (STEP(1, 64) + STEP(1, 16 + 100)) / 2


def test_the_view_knows_when_prefills_will_be_done():
    """1.5 s of queue and 1 s of prefill; then it begins, with half of it reused; then it is done."""
    view = view_of([0], [[1.5]])
    decision = KVCacheCentric().choose(asked(), view, NOW)
    view.dispatched(7, asked(), decision, 0, NOW)
    assigned = view.decoding["decode0"].requests[7]
    assert (assigned.ready, assigned.prefilled) == (NOW + 2.5, False)
    view.prefill["prefill0"].pace.factor = 2.0
    view.prefill_started(7, "prefill0", "decode0", 64, 32, NOW + 3)
    assert assigned.ready == NOW + 3 + 2 * 0.5
    view.prefill_done(7, "prefill0", "decode0", NOW + 5)
    assert (assigned.ready, assigned.prefilled) == (NOW + 5, True)
    assert len(view.prefill["prefill0"]) == 1, "what waited before"
    view.check()


def test_prediction_learns_t_d_unless_it_is_set():
    learned, fixed = PredictedEarlyRejection(), PredictedEarlyRejection(3.0)
    for admission in (learned, fixed):
        admission.on_completed(asked(), 10, 1.0)
        admission.on_completed(asked(), 10, 4.0)
    assert (learned.decoding_seconds, fixed.decoding_seconds) == (2.5, 3.0)
    for _ in range(300):
        learned.on_completed(asked(), 10, 8.0)
    assert learned.decoding_seconds == 8.0, "old ones are forgotten"


def test_conductor_tells_decoding_times_and_output_lengths():
    timed, lengths = PredictedEarlyRejection(), RequestLevelPrediction()
    for admission in (timed, lengths):
        actors = make_actors(scheduler=Scheduler(KVCacheCentric(), admission))
        outcome = run(actors, [make_request("a", [1] * 40, output_length=20)]).outcomes["a"]
    assert timed.decoding_seconds == pytest.approx(19 * outcome.tbt_mean_s)
    assert lengths.lengths.remaining(40, 0) == 20


def test_output_lengths_are_learned_by_prompt_length():
    lengths = OutputLengths()
    assert lengths.remaining(100, 0) is None
    lengths.learn(100, 10)
    assert lengths.remaining(100_000, 0) == 10.0, "what is known of any is better than nothing"
    for output in (10, 20, 30, 40, 50, 60, 70):
        lengths.learn(100, output)
    for _ in range(8):
        lengths.learn(5000, 400)
    assert lengths.remaining(100, 0) == (10 + 10 + 20 + 30 + 40 + 50 + 60 + 70) / 8
    assert lengths.remaining(100, 40) == (50 + 60 + 70) / 3 - 40
    assert lengths.remaining(100, 70) == 70.0, "longer than any: as many again"
    assert lengths.remaining(5000, 100) == 300.0


def test_request_level_prediction_lets_short_outputs_leave():
    view = view_of([0], decoding=[[16, 16]], slo=SLO(tbt=STEP(1, 64)))
    admission = RequestLevelPrediction()
    assert judged(admission, view).estimate == STEP(3, 96), "nothing is known: nobody leaves"
    for _ in range(8):
        admission.on_completed(asked(), 4, 0.0)
        admission.on_completed(RequestView.of(request(1)), 4, 0.0)
    assert judged(admission, view) is None, "in a second, when its prefill is done, they will have left"


@pytest.mark.parametrize(("produced", "stays"), [(95, False), (20, True)])
def test_request_level_prediction_counts_what_others_have_got_so_far(produced, stays):
    """Of outputs of 100 tokens, at 0.06 to 0.09 s each: the prefill ends in a second."""
    view, admission = view_of([0], decoding=[[16]], slo=SLO(tbt=0.0)), RequestLevelPrediction()
    admission.on_completed(asked(), 100, 0.0)
    view.decoding["decode0"].tokens(list(view.decoding["decode0"].requests), NOW, produced)
    assert judged(admission, view).estimate == (STEP(2, 16 + produced + 64) if stays else STEP(1, 64))


def test_request_level_prediction_counts_who_joins_later():
    view = view_of([0], slo=SLO(tbt=0.0))
    add(view, 1, 160, NOW + 5)
    admission = RequestLevelPrediction()
    assert judged(admission, view).estimate == STEP(2, 224)
    for _ in range(8):
        admission.on_completed(asked(), 10, 0.0)
    assert judged(admission, view).estimate == STEP(1, 64), "it leaves before the other joins"


# --- SLOs and priorities of requests


@pytest.mark.parametrize("name", [name for name in ADMISSIONS if name != "none"])
def test_a_request_may_name_its_own_slo(name):
    view = view_of([0], [[2.0]], slo=SLO(ttft=3.5))
    assert judged(load_admission(name), view, asked(ttft_slo=2.5)).limit == 2.5
    assert judged(load_admission(name), view_of([0], [[9.0]], slo=SLO(ttft=3.5)), asked(ttft_slo=20.0)) is None


def test_a_request_must_not_slow_those_with_a_tighter_slo():
    view = view_of([0], slo=SLO(tbt=1.0))
    tight = STEP(1, 64)
    add(view, 1, 16, NOW, tbt_slo=tight)
    assert judged(SLOCheck(), view).limit == tight
    view.left(1, "decode0")
    assert judged(SLOCheck(), view) is None
    assert judged(SLOCheck(), view, asked(tbt_slo=tight / 2)).limit == tight / 2


def test_lower_priorities_are_rejected_first():
    """Half of the demand is of priority 9: to priority 0 a queue of 1.5 s counts as 3 s."""
    view, admission = view_of([0], [[1.5]], slo=SLO(ttft=3.0)), SLOCheck()
    assert judged(admission, view, asked(priority=0)) is None, "alone it has all of the SLO"
    for _ in range(300):
        last = [judged(admission, view, asked(priority=priority)) for priority in (9, 0)]
    assert last[0] is None and 3.9 < last[1].estimate < 4.1
    assert last[1].reason == "predicted TTFT for priority 0 is above the SLO" and last[1].limit == 3
    idle = view_of([0], slo=SLO(ttft=1.0))
    assert judged(admission, idle, asked(priority=0)) is None, "where nothing is queued all are equal"
    for _ in range(600):
        judged(admission, view, asked(priority=0))
    near = view_of([0], [[1.5]], slo=SLO(ttft=2.6))
    assert judged(admission, near, asked(priority=0)) is None, "who is above is forgotten"


def test_lower_priorities_leave_decoding_to_higher_ones_too():
    view, admission = view_of([0], decoding=[[16] * 4], slo=SLO(tbt=STEP(5, 128))), SLOCheck()
    for _ in range(300):
        high, low = (judged(admission, view, asked(priority=priority)) for priority in (5, 2))
    assert high is None and "predicted TBT" in low.reason and "for priority 2" in low.reason
    alone = view_of([0], slo=SLO(tbt=STEP(1, 64)))
    assert judged(admission, alone, asked(priority=2)) is None, "its own step is shared with nobody"


def test_no_class_feels_more_than_ten_times_the_queue():
    view, admission = view_of([0], [[0.5]], slo=SLO(ttft=2.0)), SLOCheck()
    for _ in range(600):
        judged(admission, view, asked(priority=9))
    assert judged(admission, view, asked(priority=0)).estimate == pytest.approx(10 * 0.5 + 1.0)


def test_under_overload_the_higher_class_is_served():
    """Twice what the cluster can prefill: of each class as many requests."""
    scheduler = Scheduler(KVCacheCentric(), SLOCheck())
    actors = make_actors(
        prefill=1, slots=16, slo=SLO(ttft=2.0), limits=DecodingLimits(64, 10_000, BLOCK), scheduler=scheduler
    )
    requests = []
    for number in range(160):
        plain = make_request(number, [number] * 200, arrival=0.1 * number, output_length=2)
        requests.append(dataclasses.replace(plain, priority=7 if number % 4 == 0 else 1))
    outcomes = run(actors, requests).outcomes
    served = {
        priority: sum(outcomes[r.id].status == COMPLETED for r in requests if r.priority == priority)
        for priority in (7, 1)
    }
    assert served[7] >= 39, "of 40"
    assert 20 <= served[1] <= 60, "of 120, with the capacity that is left"
