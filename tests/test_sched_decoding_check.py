"""TBT is judged again as KVCache arrives (report 3, step 4): who is turned away, and that nothing of him stays."""

import dataclasses
import math

import pytest
from virtual_cluster import BLOCK, COST, VirtualCluster, make_actors, make_request, run

from mooncake_jax.request import COMPLETED, REJECTED, SLO
from mooncake_jax.sched.actions import DropKVCache, LoadKVCache, Send
from mooncake_jax.sched.admission import NoAdmission
from mooncake_jax.sched.decoding import DecodingInstance, DecodingLimits
from mooncake_jax.sched.kvcache_centric import KVCacheCentric
from mooncake_jax.sched.messages import CONDUCTOR, DecodingRejected, KVCacheReceived, PrefillDone
from mooncake_jax.sched.scheduler import Scheduler
from mooncake_jax.sched.serve import serve

LIMITS = DecodingLimits(16, 1000, BLOCK)
TWO = SLO(tbt=COST.step(2, 300))  # two requests of 100 tokens keep it, three do not
REASON = "predicted TBT is above the SLO as its KVCache arrives"


def unchecked(**options):
    """Actors whose Conductor serves all: only the decoding instance judges."""
    scheduler = Scheduler(KVCacheCentric(), NoAdmission())
    return make_actors(prefill=3, limits=LIMITS, scheduler=scheduler, **options)


def three():
    return [make_request(n, [n] * 100, 0.001 * n, output_length=80) for n in range(3)]


def test_who_would_break_the_slo_ends_once_as_rejected_and_nothing_of_him_stays():
    cluster = run(unchecked(slo=TWO, decoding_cost=COST), three())  # asserts that pins and attempts are gone
    assert [cluster.outcomes[str(n)].status for n in range(3)] == [COMPLETED, COMPLETED, REJECTED]
    late = cluster.outcomes["2"]
    assert (late.reason, late.limit, late.output_tokens) == (REASON, TWO.tbt, 0)
    assert COST.step(3, 300) <= late.estimate < COST.step(3, 310)
    assert late.reused_tokens == 0 and late.prefill_instance == "prefill2", "its prefill is wasted"
    assert not any(cluster.held.values()), "its KVCache is dropped"
    assert sum(isinstance(message, DecodingRejected) for *_, message in cluster.log) == 1


@pytest.mark.parametrize(("slo", "cost"), [(TWO, None), (SLO(ttft=1e6), COST)])
def test_without_a_cost_or_an_slo_all_are_decoded(slo, cost):
    outcomes = run(unchecked(slo=slo, decoding_cost=cost), three()).outcomes
    assert [o.status for o in outcomes.values()] == [COMPLETED] * 3


def test_the_rejection_may_come_before_the_end_of_the_prefill():
    class LateEnd(VirtualCluster):
        def push(self, at, node, message):
            super().push(at + 0.5 * isinstance(message, PrefillDone), node, message)

    actors = unchecked(slo=TWO, decoding_cost=COST)
    cluster = LateEnd(actors, three())
    serve(actors, cluster)
    assert cluster.outcomes["2"].status == REJECTED
    assert not actors[CONDUCTOR].attempts and actors[CONDUCTOR].view.pool.pins() == 0 and actors[CONDUCTOR].view.idle


def test_a_rejection_of_an_attempt_that_is_over_says_nothing():
    actors = unchecked()
    assert actors[CONDUCTOR].handle(DecodingRejected(7, "decode0", REASON, 2.0, 1.0), 0.0) == []


def received(dispatch, tokens=100, **fields):
    request = dataclasses.replace(make_request(dispatch, [dispatch] * tokens, output_length=8), **fields)
    return KVCacheReceived(dispatch, request, 5)


def rejections(instance, *arrivals):
    """DecodingRejected of each, None where it is taken in."""
    answers = []
    for arrival in arrivals:
        actions = instance.handle(arrival, 0.0)
        told = [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, DecodingRejected)]
        assert bool(told) == (DropKVCache(arrival.dispatch) in actions)
        answers.append(told[0] if told else None)
        instance.check()
    return answers


def instance(tbt_slo=math.inf, max_batch=16):
    return DecodingInstance("decode0", dataclasses.replace(LIMITS, tbt_slo=tbt_slo, max_batch=max_batch), COST)


def test_what_just_meets_the_slo_is_taken():
    assert rejections(instance(COST.step(2, 200)), received(1), received(2)) == [None, None]
    tight = instance(math.nextafter(COST.step(2, 200), 0))
    assert rejections(tight, received(1), received(2))[1] == DecodingRejected(
        2, "decode0", REASON, COST.step(2, 200), tight.limits.tbt_slo
    )
    assert list(tight.loading) == [1], "the other one is loaded"


def test_one_that_is_alone_can_be_too_slow_as_well():
    [rejected] = rejections(instance(COST.step(1, 99)), received(1))
    assert (rejected.estimate, rejected.limit) == (COST.step(1, 100), COST.step(1, 99))


def test_the_tightest_slo_of_those_that_decode_together_counts():
    own = COST.step(1, 150)
    first, second = rejections(instance(), received(1, tbt_slo=own), received(2))
    assert first is None and second.limit == own, "the other's"
    first, second = rejections(instance(), received(1), received(2, tbt_slo=own))
    assert first is None and second.limit == own, "its own"
    assert rejections(instance(COST.step(1, 50)), received(1, tbt_slo=own)) == [None], "its own is wider"


def test_who_waits_for_a_place_decodes_with_no_more_than_a_batch():
    arrivals = [received(n) for n in range(6)]
    assert rejections(instance(COST.step(2, 200), max_batch=2), *arrivals) == [None] * 6
    assert rejections(instance(COST.step(1, 100), max_batch=2), *arrivals)[1:] != [None] * 5


def test_tokens_that_came_since_count():
    decoding = instance(COST.step(2, 202))
    [load] = [a for a in decoding.handle(received(1), 0.0) if isinstance(a, LoadKVCache)]
    joined = dataclasses.replace(decoding.loading[load.dispatch], produced=3)
    decoding.loading[load.dispatch] = joined
    [rejected] = rejections(decoding, received(2))
    assert rejected.estimate == COST.step(2, 203)
