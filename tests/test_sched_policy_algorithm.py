"""Algorithm 1 against a brute-force reading of the paper's lines, on random states, ties included."""

import math
import random
from collections import Counter

import pytest
from cluster_states import BLOCK, BYTES, NOW, ExactCost, request, view_of

from mooncake_jax.request import SLO
from mooncake_jax.sched.admission import SLOCheck
from mooncake_jax.sched.decisions import Reject
from mooncake_jax.sched.kvcache_centric import KVCacheCentric
from mooncake_jax.sched.scheduler import Scheduler

STATES = 10_000


class State:
    """A random state in plain figures, that the algorithm below reads without our classes."""

    def __init__(self, rng):
        self.blocks = rng.choice([0, 1, 2, 4, 8])
        self.length = self.blocks * BLOCK + rng.choice([0, 1, 8]) or 1
        instances = rng.randrange(1, 7)
        self.held = [rng.randrange(self.blocks + 1) for _ in range(instances)]
        self.waiting = [[rng.choice([0.25, 0.5, 1.0]) for _ in range(rng.randrange(3))] for _ in range(instances)]
        self.begun = [rng.choice([None, NOW - 0.25, NOW - 4.0]) for _ in range(instances)]  # the first that waits
        self.pace = [rng.choice([0.5, 1.0, 1.0, 2.0]) for _ in range(instances)]
        self.decoding = [
            [rng.choice([16, 16, 48]) for _ in range(rng.randrange(3))] for _ in range(rng.randrange(1, 4))
        ]
        self.byte = 2.0 ** rng.choice([-20, -14, -12])
        self.transfer_pace = rng.choice([1.0, 2.0])
        self.sending = [rng.choice([0, 0, 1, 3]) for _ in range(instances)]  # copies that leave it already
        self.threshold = rng.choice([1.0, 1.5, 2.0, 4.0])
        self.slo = SLO(ttft=rng.choice([math.inf, 1.0, 3.0]), tbt=rng.choice([math.inf, math.inf, 0.0625]))
        self.room = rng.choice([None, 64, 160])

    def view(self):
        cost = ExactCost(self.byte)
        view = view_of(self.held, self.waiting, self.decoding, self.slo, cost, self.room, self.pace)
        view.transfer_pace.factor = self.transfer_pace
        for place, copies in enumerate(self.sending):
            for copy in range(copies):
                view.copy_started(10 * place + copy, f"prefill{place}", 16, NOW)
        number = 0
        for queue, waiting, begun in zip(view.prefill.values(), self.waiting, self.begun):
            if waiting and begun is not None:
                queue.begin(number, 1, waiting[0], begun)
            number += len(waiting)
        return view


def estimate_prefill_queue_time(s, i):
    total = 0.0
    for place, seconds in enumerate(s.waiting[i]):
        seconds *= s.pace[i]
        total += max(0.0, s.begun[i] + seconds - NOW) if place == 0 and s.begun[i] is not None else seconds
    return total


def estimate_prefill_execution_time(s, i, prefix_len):
    return s.pace[i] * ExactCost(s.byte).prefill(s.length, prefix_len)


def estimate_kvcache_transfer_time(s, source, transfer_len):
    return s.transfer_pace * transfer_len * BYTES * s.byte * (s.sending[source] + 1)


def select_decoding_instance(s):
    """Least TBT within capacity, else least KVCache; equals: less KVCache, fewer requests, the first."""
    ranked = []
    for d, prompts in enumerate(s.decoding):
        tbt = ExactCost(s.byte).step(len(prompts) + 1, sum(prompts) + s.length)
        full = s.room is not None and sum(prompts) + s.length > s.room
        ranked.append((full, 0.0 if full else tbt, sum(prompts), 0 if full else len(prompts), d, tbt))
    *_, d, tbt = min(ranked)
    return d, tbt


def algorithm_1(s):
    """(p, d, the instance that is copied from or None, TTFT, TBT, whether T was tied), or why it is rejected."""
    prefix_lens = [min(blocks * BLOCK, s.length - 1) for blocks in s.held]
    best_len, best_instance = max((length, -i) for i, length in enumerate(prefix_lens))
    best_instance = -best_instance
    ttft, p, estimates = math.inf, None, []
    for i, prefix_len in enumerate(prefix_lens):
        t_queue = estimate_prefill_queue_time(s, i)
        if best_len == 0 or (prefix_len > 0 and best_len / prefix_len < s.threshold):
            estimate = t_queue + estimate_prefill_execution_time(s, i, prefix_len)
        else:
            t_transfer = estimate_kvcache_transfer_time(s, best_instance, best_len - prefix_len)
            estimate = t_transfer + t_queue + estimate_prefill_execution_time(s, i, best_len)
        estimates.append(estimate)
        if ttft > estimate:
            ttft, p = estimate, i
    d, tbt = select_decoding_instance(s)
    if ttft > s.slo.ttft or tbt > s.slo.tbt:
        return "reject", ttft, tbt
    copies = best_len > 0 and (prefix_lens[p] == 0 or best_len / prefix_lens[p] > s.threshold)
    return p, d, best_instance if copies else None, ttft, tbt, estimates.count(ttft) > 1


def test_the_same_decision_on_random_states():
    rng, seen = random.Random(1), Counter()
    for _ in range(STATES):
        state = State(rng)
        expected = algorithm_1(state)
        asked = request(state.blocks, state.length - state.blocks * BLOCK)
        decision = Scheduler(KVCacheCentric(state.threshold), SLOCheck()).dispatch(asked, state.view(), NOW)
        if expected[0] == "reject":
            assert isinstance(decision, Reject), vars(state)
            assert decision.estimate in expected[1:] and decision.estimate > decision.limit
            seen["rejected"] += 1
            continue
        p, d, source, ttft, tbt, tied = expected
        found = (decision.prefill, decision.decoding, decision.replicate_from)
        assert found == (f"prefill{p}", f"decode{d}", source if source is None else f"prefill{source}"), vars(state)
        assert (decision.ttft, decision.tbt) == (ttft, tbt), vars(state)
        assert source is None or decision.replicate_blocks == state.held[source]
        seen.update({"dispatched": 1, "copied": source is not None, "tied": tied})
    assert min(seen[kind] for kind in ("rejected", "dispatched", "copied", "tied")) > STATES / 20, seen


@pytest.mark.parametrize(("threshold", "copied"), [(1.5, True), (2.0, False), (4.0, False)])
def test_at_the_threshold_a_copy_is_weighed_but_not_made(threshold, copied):
    """best 4 blocks, own 2: a ratio of 2. The lines say < for the estimate and > for the copy."""
    view = view_of([4, 2], [[8.0], []])
    asked = request(4, 8)
    decision = Scheduler(KVCacheCentric(threshold), SLOCheck()).dispatch(asked, view, NOW)
    cost = ExactCost()
    moved = cost.transfer(32 * BYTES) + cost.prefill(72, 64)
    assert decision.prefill == "prefill1"
    assert decision.ttft == (cost.prefill(72, 32) if threshold > 2 else moved)
    assert (decision.replicate_from == "prefill0") == copied
