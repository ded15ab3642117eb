"""Prefill policies and the choice of a decoding instance, by worked cases."""

import pytest
from cluster_states import BYTES, NOW, ExactCost, request, view_of

from mooncake_jax.errors import UsageError
from mooncake_jax.sched.decisions import Dispatch
from mooncake_jax.sched.kvcache_centric import AdaptiveKVCacheCentric, CacheAware, KVCacheCentric
from mooncake_jax.sched.placement import least_loaded
from mooncake_jax.sched.plugins import POLICIES, load_policy
from mooncake_jax.sched.policies import LoadBalancing, RandomChoice, RoundRobin
from mooncake_jax.sched.view import RequestView


def asked(*arguments, **fields):
    return RequestView.of(request(*arguments, **fields))


def choices(policy, view, count):
    return [policy.choose(asked(), view, NOW).prefill for _ in range(count)]


def test_round_robin_takes_each_in_turn_and_goes_on_when_one_is_lost():
    policy, view = RoundRobin(), view_of([0, 0, 0])
    assert choices(policy, view, 4) == ["prefill0", "prefill1", "prefill2", "prefill0"]
    view.lost("prefill1")
    assert choices(policy, view, 3) == ["prefill0", "prefill2", "prefill0"]


def test_random_is_even_and_the_same_for_the_same_seed():
    view = view_of([0, 0, 0])
    drawn = choices(RandomChoice(7), view, 600)
    assert drawn == choices(RandomChoice(7), view, 600) != choices(RandomChoice(8), view, 600)
    assert all(160 < drawn.count(node) < 240 for node in view.prefill)


def test_random_draws_the_published_sequence_of_splitmix64():
    published = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431)  # of seed 1234567
    drawn = choices(RandomChoice(1234567), view_of([0] * 7), 4)
    assert drawn == [f"prefill{bits % 7}" for bits in published]


def test_load_balancing_counts_requests_not_their_seconds():
    view = view_of([0, 0, 0], [[0.5, 0.5], [9.0], [9.0]])
    assert choices(LoadBalancing(), view, 1) == ["prefill1"]


def test_cache_aware_weighs_its_own_cache_against_the_queue_and_copies_nothing():
    # 64 tokens: 1 s from nothing, 1/64 s with all cached (the last token is computed)
    near, far = view_of([4, 0], [[0.5]]), view_of([4, 0], [[2.0]])
    tbt = 2 / 64 + 64 / 4096
    assert CacheAware().choose(asked(), near, NOW) == Dispatch("prefill0", "decode0", 0.5 + 1 / 64, tbt)
    chosen = CacheAware().choose(asked(), far, NOW)
    assert (chosen.prefill, chosen.ttft, chosen.replicate_from) == ("prefill1", 1.0, None)


def test_kvcache_centric_copies_where_the_queue_at_the_cache_is_long():
    chosen = KVCacheCentric(2.0).choose(asked(), view_of([4, 0], [[2.0]]), NOW)
    assert (chosen.prefill, chosen.replicate_from, chosen.replicate_blocks) == ("prefill1", "prefill0", 4)
    assert chosen.ttft == 63 * BYTES * 2.0**-14 + 1 / 64


def test_equals_go_to_the_first():
    for policy in (KVCacheCentric(), CacheAware(), LoadBalancing()):
        assert choices(policy, view_of([2, 2, 2]), 1) == ["prefill0"]


@pytest.mark.parametrize("threshold", [0.99, float("nan"), -1.0])
def test_a_threshold_that_means_nothing_is_refused(threshold):
    with pytest.raises(UsageError, match="--kvcache_balancing_threshold=.*at least 1"):
        KVCacheCentric(threshold)


@pytest.mark.parametrize(("byte", "end"), [(2.0**-8, "up"), (2.0**-20, "down")])
def test_an_adaptive_threshold_goes_where_it_pays(byte, end):
    """prefill1 has 2 of 4 blocks. A slow link makes computing the other half quicker, a fast one copying it."""
    policy, view = AdaptiveKVCacheCentric(1.6), view_of([4, 2], [[50.0]], cost=ExactCost(byte))
    ratio = (4 * 16 - 1 + 16) / (2 * 16 + 16)  # 1.65
    first = policy.choose(asked(), view, NOW)
    assert (first.prefill, first.replicate_from) == ("prefill1", "prefill0")
    for _ in range(40):
        last = policy.choose(asked(), view, NOW)
    if end == "up":
        assert ratio < policy.threshold < ratio * 1.06 and last.replicate_from is None
        assert last.ttft == 0.5, "computed"
    else:
        assert policy.threshold == 1.6 and last.replicate_from == "prefill0", "it was right"
        policy.threshold = 3.0
        for _ in range(40):
            last = policy.choose(asked(), view, NOW)
        assert ratio / 1.06 < policy.threshold <= ratio and last.replicate_from == "prefill0"


def test_an_adaptive_threshold_learns_from_copies_that_were_slow():
    """The cost model says copying pays; what really happened says that the links are congested."""
    policy, view = AdaptiveKVCacheCentric(1.6), view_of([4, 2], [[50.0]], cost=ExactCost(2.0**-14))
    assert policy.choose(asked(), view, NOW).replicate_from == "prefill0"
    for number in range(30):
        view.copy_started(number, "prefill0", 32, NOW)
        view.copied(number, NOW + 8 * view.cost.transfer(32 * BYTES))
    view.check()
    for _ in range(40):
        last = policy.choose(asked(), view, NOW)
    assert last.replicate_from is None and policy.threshold > 1.6


def test_copies_that_leave_an_instance_already_slow_the_next_one():
    view = view_of([4, 0])
    alone = view.transfer(32, "prefill0")
    view.copy_started(1, "prefill0", 16, NOW)
    view.copy_started(2, "prefill0", 16, NOW)
    assert (view.transfer(32, "prefill0"), view.transfer(32, "prefill1")) == (3 * alone, alone)
    view.copied(1, NOW + alone / 2)
    view.copy_lost(2)
    view.copied(3, NOW + 99.0)
    assert view.transfer(32, "prefill0") == alone, "and it took what it should"
    view.check()


@pytest.mark.parametrize(("pace", "threshold", "moved"), [(1.0, 1.6, 1.05), (4.0, 1.6, 1.0), (4.0, 3.0, 1 / 1.05)])
def test_an_adaptive_threshold_counts_how_fast_the_instance_computes(pace, threshold, moved):
    """31 tokens take 0.97 s to copy, 32 take 0.5 s to compute: 2 s at an instance four times as slow."""
    policy = AdaptiveKVCacheCentric(threshold)
    view = view_of([4, 2], [[50.0]], cost=ExactCost(2.0**-11), pace=[1.0, pace])
    assert policy.choose(asked(), view, NOW).prefill == "prefill1"
    assert policy.threshold == pytest.approx(threshold * moved)


def test_an_adaptive_threshold_stays_between_1_and_64():
    fast, slow = ExactCost(2.0**-20), ExactCost(2.0**-8)
    low, high = AdaptiveKVCacheCentric(1.03), AdaptiveKVCacheCentric(63.0)
    low.choose(asked(63), view_of([63, 62], [[50.0]], cost=fast), NOW)
    high.choose(asked(64, 1), view_of([64, 0], [[1e4]], cost=slow), NOW)
    assert (low.threshold, high.threshold) == (1.0, 64.0)


def test_an_adaptive_threshold_is_not_moved_by_who_has_the_best_match():
    policy = AdaptiveKVCacheCentric(1.6)
    for held in ([4, 4], [0, 0]):
        policy.choose(asked(), view_of(held), NOW)
    assert policy.threshold == 1.6


def test_decoding_goes_to_the_least_tbt_not_to_the_fewest_requests():
    # steps of (1 + batch) / 64 + context / 4096: 3 requests of 16 tokens, or 1 of 400
    view = view_of([0], decoding=[[400], [16, 16, 16]])
    node, tbt = least_loaded(asked(2), view)
    assert (node, tbt) == ("decode1", 5 / 64 + 80 / 4096)


def test_decoding_stays_within_kv_capacity():
    # decode0 would step quicker: it has one large request, and no room
    crowded = [[150], [16] * 6]
    assert least_loaded(asked(2), view_of([0], decoding=crowded))[0] == "decode0"
    assert least_loaded(asked(2), view_of([0], decoding=crowded, kv_tokens=180))[0] == "decode1"
    assert least_loaded(asked(2), view_of([0], decoding=crowded, kv_tokens=182))[0] == "decode0"
    assert least_loaded(asked(2), view_of([0], decoding=crowded, kv_tokens=50))[0] == "decode1", (
        "all full: least KVCache"
    )


def test_requests_still_in_prefill_count_at_their_decoding_instance():
    view = view_of([0], decoding=[[], []])
    for number, expected in enumerate(["decode0", "decode1", "decode0"]):
        decision = RoundRobin().choose(asked(), view, NOW)
        assert decision.decoding == expected
        view.dispatched(number, asked(), decision, 0, NOW)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_predicts_what_the_queue_and_the_cache_say(name):
    view = view_of([2], [[0.25, 0.5]])
    decision = load_policy(name).choose(asked(4, 8), view, NOW)
    assert decision == Dispatch("prefill0", "decode0", 0.75 + 40 / 64, 2 / 64 + 72 / 4096)
