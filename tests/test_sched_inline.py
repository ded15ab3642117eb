"""Inlined prefills: when one is better where it is decoded, how its instance computes it, and that each ends once."""

import random

import pytest
from cluster_states import NOW, ExactCost, request, view_of
from virtual_cluster import BLOCK, COST, VirtualCluster, make_actors, make_request, run

from mooncake_jax.request import COMPLETED, FAILED, REJECTED, SLO
from mooncake_jax.sched.actions import DropKVCache, InlinePrefill, LoadKVCache, RunStep, Send
from mooncake_jax.sched.admission import NoAdmission, SLOCheck
from mooncake_jax.sched.decisions import Dispatch
from mooncake_jax.sched.decoding import DecodingInstance, DecodingLimits
from mooncake_jax.sched.inline import inline_if_better
from mooncake_jax.sched.kvcache_centric import KVCacheCentric
from mooncake_jax.sched.messages import (
    CONDUCTOR,
    Cancel,
    DecodingRejected,
    KVCacheLoaded,
    KVCacheReceived,
    NodeLost,
    PrefillDone,
    PrefillFailed,
    PrefillInlined,
    PrefillStarted,
    StartPrefill,
    StepDone,
    TokensDecoded,
)
from mooncake_jax.sched.scheduler import Scheduler
from mooncake_jax.sched.serve import serve
from mooncake_jax.sched.view import RequestView

STEP = ExactCost().step
LEAST = 2**-10  # seconds


def decided(view, blocks=4, **fields):
    """Of a prompt of so many blocks of 16 tokens, a quarter of a second each."""
    asked = RequestView.of(request(blocks, **fields))
    return inline_if_better(asked, KVCacheCentric().choose(asked, view, NOW), view)


def inlined(view, blocks=4, **fields):
    return decided(view, blocks, **fields).inlined


# --- the decision


def test_an_idle_instance_computes_what_no_other_computes_sooner():
    assert decided(view_of([0])) == Dispatch("decode0", "decode0", 1.0, STEP(1, 64), inlined=True)
    assert not inlined(view_of([1])), "a block is there: reuse is worth going"
    assert inlined(view_of([1], [[0.25]])), "but not waiting for what it spares"
    assert not inlined(view_of([1], [[0.25 - LEAST]]))


def test_without_an_slo_nobody_who_decodes_is_stalled():
    assert not inlined(view_of([0], [[9.0]], decoding=[[16]]))


def test_a_step_and_the_prefill_fit_into_the_tbt_slo():
    stalled = STEP(2, 16 + 64) + 1.0
    busy = {"held": [0], "waiting": [[9.0]], "decoding": [[16]]}
    assert inlined(view_of(**busy, slo=SLO(tbt=stalled)))
    assert not inlined(view_of(**busy, slo=SLO(tbt=stalled - LEAST)))
    assert not inlined(view_of(**busy, slo=SLO(tbt=stalled)), tbt_slo=stalled - LEAST), "its own"
    assert not inlined(view_of([0], slo=SLO(tbt=1.0))), "somebody may join meanwhile"
    view = view_of(**busy, slo=SLO(tbt=99.0))
    view.decoding["decode0"].add(70, 0, NOW, tbt_slo=1.0)
    assert not inlined(view), "another's"


def test_its_ttft_counts_the_step_under_way():
    step, slo = STEP(2, 16 + 64), SLO(tbt=9.0)
    assert decided(view_of([0], [[step]], decoding=[[16]], slo=slo)).ttft == step + 1.0
    assert not inlined(view_of([0], [[step - LEAST]], decoding=[[16]], slo=slo))


def on_its_way(slo, waiting):
    """One of 128 tokens is to be inlined already."""
    view = view_of([0], [[waiting]], slo=slo)
    first = RequestView.of(request(8, name="first"))
    view.dispatched(70, first, inline_if_better(first, Dispatch("prefill0", "decode0", 99.0, 0.0), view), 0, NOW)
    assert view.decoding["decode0"].inlining == {70: 2.0}
    return view


def test_those_on_their_way_count():
    step = STEP(2, 128 + 64)
    assert decided(on_its_way(SLO(tbt=step + 2.0), 9.0)).ttft == 2 * step + 3.0
    assert not inlined(on_its_way(SLO(tbt=step + 2.0), 2 * step + 2.0 - LEAST))
    late = on_its_way(SLO(tbt=step + 2.0), 9.0)
    late.decoding["decode0"].tightest_tbt -= LEAST
    assert not inlined(late), "the other one's stall is the longest"
    assert not inlined(on_its_way(SLO(), 9.0)), "its first token may come first"


def test_what_they_really_take_counts():
    view = on_its_way(SLO(tbt=9.0), 9.0)
    view.inlined(70, "decode0", 4.0)
    view.prefill_done(70, "decode0", "decode0", NOW)
    pace = view.decoding["decode0"].inline_pace.factor
    assert pace > 1.4 and not view.decoding["decode0"].inlining
    assert decided(view).ttft == STEP(2, 128 + 64) + pace * 1.0
    stalled = STEP(2, 128 + 64) + pace * 1.0
    assert inlined(view, tbt_slo=stalled) and not inlined(view, tbt_slo=stalled - LEAST)


def test_an_instance_without_room_for_its_kvcache_does_not():
    assert inlined(view_of([0], kv_tokens=64)) and not inlined(view_of([0], kv_tokens=63))


def test_a_prompt_that_needs_a_chunk_goes_where_the_policy_says():
    scheduler = Scheduler(KVCacheCentric(), SLOCheck(), longest_inlined=64)
    decisions = [scheduler.dispatch(request(4, tail), view_of([0]), NOW) for tail in (0, 1)]
    assert [decision.prefill for decision in decisions] == ["decode0", "prefill0"]


def test_no_policy_inlines_by_itself():
    class Own:
        def choose(self, *_):
            return Dispatch("prefill0", "decode0", 1.0, 0.1, inlined=True)

    fault = Scheduler(Own(), SLOCheck(), longest_inlined=64).dispatch(request(), view_of([0]), NOW)
    assert fault.reason == "policy Own inlines a prefill, which --inline_prefill decides"


def test_admission_judges_the_ttft_that_inlining_makes():
    late = view_of([0], [[9.0]], slo=SLO(ttft=2.0))
    assert Scheduler(KVCacheCentric(), SLOCheck(), longest_inlined=64).dispatch(request(), late, NOW).inlined
    assert Scheduler(KVCacheCentric(), SLOCheck()).dispatch(request(), late, NOW).reason


# --- the decoding instance


def start(dispatch, tokens=20, output=4):
    return StartPrefill(dispatch, make_request(dispatch, [dispatch] * tokens, output_length=output), "decode0", ())


def received(dispatch):
    return KVCacheReceived(dispatch, start(dispatch).request, 5)


class Instance:
    """Answers of a decoding instance without what it tells Conductor, which is kept in `told`."""

    def __init__(self, cost=None, **limits):
        self.actor = DecodingInstance(
            "decode0", DecodingLimits(**{"max_batch": 8, "pages": 64, **limits}, page_size=16), cost
        )
        self.told = []

    def __call__(self, message):
        actions = self.actor.handle(message, NOW)
        self.actor.check()
        self.told += [action.message for action in actions if isinstance(action, Send) and action.to == CONDUCTOR]
        return [action for action in actions if not isinstance(action, Send)]

    def stepped(self):
        return self(StepDone(tuple((dispatch, 7) for dispatch in self.actor.batch), 0.01))


def test_it_computes_the_prompt_and_tells_what_a_prefill_instance_would():
    instance = Instance()
    assert instance(start(1)) == [InlinePrefill(1, start(1).request)]
    assert instance.told == [PrefillStarted(1, "decode0", 0)]
    assert instance(PrefillInlined(1, 0.5, 3, top_logits=((3, 1.0),))) == [RunStep((1,))]
    done, tokens = instance.told[1:]
    assert done == PrefillDone(1, "decode0", 0, 0.5, (), top_logits=((3, 1.0),))
    assert isinstance(tokens, TokensDecoded) and tokens.tokens[0].token_id == 3
    assert [instance.stepped() for _ in range(3)][-1] == [DropKVCache(1)]


def test_one_prompt_between_two_steps():
    instance = Instance()
    instance(received(1))
    assert instance(KVCacheLoaded(1)) == [RunStep((1,))]
    assert instance(start(2)) == instance(start(3)) == []
    assert instance(received(4)) == [LoadKVCache(4, received(4).request, 5)], "loads go on"
    assert instance.stepped() == [InlinePrefill(2, start(2).request)]
    assert instance(KVCacheLoaded(4)) == []
    assert instance(PrefillInlined(2, 0.5, 3)) == [RunStep((1, 4, 2), yields=True)]
    assert instance.stepped() == [InlinePrefill(3, start(3).request)]
    assert instance(PrefillInlined(3, 0.5, 3)) == [RunStep((1, 4, 2, 3))]


def test_prompts_wait_in_the_same_line_for_the_same_places():
    instance = Instance(max_batch=1)
    instance(received(1))
    assert instance(KVCacheLoaded(1)) == [RunStep((1,))]
    assert instance(start(2)) == instance(received(3)) == []
    assert instance(Cancel(1)) == [DropKVCache(1)]
    assert instance.stepped() == [InlinePrefill(2, start(2).request)]
    assert instance(Cancel(2)) == [DropKVCache(2), LoadKVCache(3, received(3).request, 5)]


def test_cancelled_at_any_time():
    instance = Instance(max_batch=2)
    instance(start(1))
    assert instance(start(2)) == instance(start(3)) == []
    assert instance(Cancel(3)) == instance(Cancel(2)) == []
    cancelled = [PrefillFailed(dispatch, "decode0", "cancelled") for dispatch in (3, 2)]
    assert instance.told[1:] == cancelled
    assert instance(Cancel(1)) == [DropKVCache(1)]
    assert instance(start(4)) == [], "the device is still taken"
    assert instance(PrefillInlined(1, 0.5, 3)) == [InlinePrefill(4, start(4).request)]
    assert instance.told[3:] == [PrefillDone(1, "decode0", 0, 0.5, ()), PrefillStarted(4, "decode0", 0)]
    assert instance(PrefillInlined(4, 0.5, 3)) == [RunStep((4,))]
    assert instance(Cancel(4)) == [DropKVCache(4)]


def test_one_that_fails_harms_no_other():
    instance = Instance()
    instance(start(1))
    instance(start(2))
    failed = PrefillFailed(1, "decode0", "MemoryError: no room")
    assert instance(failed) == [InlinePrefill(2, start(2).request)]
    assert instance.told[1] == failed


def test_one_that_can_never_be_served_is_refused_before_it_is_computed():
    instance = Instance(pages=1)
    assert instance(start(1)) == []
    assert [type(message).__name__ for message in instance.told] == ["DecodingFailed", "PrefillFailed"]
    judging = Instance(cost=COST, tbt_slo=COST.step(1, 19))
    assert judging(start(1)) == []
    assert isinstance(judging.told[0], DecodingRejected) and isinstance(judging.told[1], PrefillFailed)


# --- the cluster


def inlining(admission=None, **options):
    scheduler = Scheduler(KVCacheCentric(), admission or NoAdmission(), longest_inlined=64)
    return make_actors(scheduler=scheduler, **options)


def test_its_kvcache_does_not_enter_the_pool_and_it_reuses_nothing():
    actors = inlining()
    cluster = run(actors, [make_request(i, range(60), arrival=i) for i in range(2)])
    assert [(o.status, o.prefill_instance, o.reused_tokens) for o in cluster.outcomes.values()] == [
        (COMPLETED, "decode0", 0)
    ] * 2
    assert actors[CONDUCTOR].inlined_prefills == 2
    assert actors[CONDUCTOR].view.pool.blocks() == {"prefill0": (0, 0), "prefill1": (0, 0)}
    assert set(actors[CONDUCTOR].prefill_work) == {"prefill0", "prefill1"}, "nor the prefill pool's MFU"


def test_one_that_fails_or_is_refused_ends_once():
    cluster = run(inlining(), [make_request("a", range(60))], failing={"a"})
    assert (cluster.outcomes["a"].status, cluster.outcomes["a"].reason) == (FAILED, "decode0: made to fail")
    tight = inlining(slo=SLO(tbt=1.0), decoding_cost=type("Slow", (), {"step": lambda *_: 2.0})())
    assert run(tight, [make_request("a", range(60))]).outcomes["a"].status == REJECTED


@pytest.mark.parametrize("at", [0.0, 0.03, 0.2])
def test_a_lost_instance_has_it_dispatched_again_or_failed(at):
    """It waits, is computed, decodes."""
    actors = inlining(decode=2)
    cluster = VirtualCluster(actors, [make_request("a", range(60), output_length=40)])
    cluster.push(at, CONDUCTOR, NodeLost("decode0"))
    plain = cluster.next_event

    def next_event():
        event = plain()
        if event is not None and isinstance(event[2], NodeLost):
            cluster.dead.add("decode0")
        return event

    cluster.next_event = next_event
    serve(actors, cluster)
    outcome = cluster.outcomes["a"]
    assert (outcome.status, outcome.decoding_instance) == ((FAILED, "decode0") if at > 0.1 else (COMPLETED, "decode1"))
    assert not actors[CONDUCTOR].attempts and actors[CONDUCTOR].view.idle


@pytest.mark.parametrize("seed", range(6))
def test_random_workloads_end_every_request_exactly_once(seed):
    rng = random.Random(seed)
    requests, at = [], 0.0
    for i in range(60):
        at += rng.expovariate(12)
        requests.append(make_request(i, [i] * rng.choice([3, 20, 64, 65, 200]), at, rng.randrange(1, 30)))
    actors = inlining(
        admission=rng.choice([NoAdmission(), SLOCheck()]),
        prefill=rng.randrange(1, 3),
        decode=rng.randrange(1, 3),
        slo=rng.choice([SLO(), SLO(tbt=0.2), SLO(ttft=0.5, tbt=0.1)]),
        decoding_cost=rng.choice([None, COST]),
        timeout=rng.choice([1e6, 0.5]),
        limits=DecodingLimits(rng.randrange(1, 5), 40, BLOCK),
    )
    cluster = run(actors, requests, failing={str(i) for i in range(0, 60, 13)})
    assert len(cluster.outcomes) == 60 and actors[CONDUCTOR].inlined_prefills
    assert not any(cluster.held.values())
