"""Algorithm 1 against a literal reading of the paper's lines, on random states."""

import math
import random

import pytest
from virtual_cluster import BLOCK, BYTES_PER_TOKEN, COST, make_request

from mooncake_jax.cache.pool import KVCachePool
from mooncake_jax.request import SLO
from mooncake_jax.sched.policy import ClusterView, DecodingLoad, Dispatch, KVCacheCentric, PrefillQueue


def algorithm_1(request, view, now, threshold):
    """Report 6.1, line by line, written without looking at the policy's code."""
    lengths = {p: 0 for p in view.prefill}
    for p in view.prefill:
        for n in range(1, len(request.block_keys) + 1):
            if view.pool.match(request.block_keys[:n])[p] == n:
                lengths[p] = min(n * BLOCK, request.prompt_tokens - 1)
    best_instance = max(lengths, key=lengths.get)
    best_len = lengths[best_instance]
    ttft, p = math.inf, None
    for instance, prefix_len in lengths.items():
        t_queue = view.prefill[instance].seconds(now)
        ratio = best_len / prefix_len if prefix_len else (math.inf if best_len else 1.0)
        if ratio < threshold or best_len == 0:
            total = t_queue + COST.prefill(request.prompt_tokens, prefix_len)
        else:
            transfer = COST.transfer((best_len - prefix_len) * BYTES_PER_TOKEN)
            total = transfer + t_queue + COST.prefill(request.prompt_tokens, best_len)
        if total < ttft - 1e-12:
            ttft, p = total, instance
    d = min(
        view.decoding,
        key=lambda n: COST.step(len(view.decoding[n].contexts) + 1, view.decoding[n].total + request.prompt_tokens),
    )
    tbt = COST.step(len(view.decoding[d].contexts) + 1, view.decoding[d].total + request.prompt_tokens)
    if ttft > view.slo.ttft or tbt > view.slo.tbt:
        return None
    final = best_len / lengths[p] if lengths[p] else (math.inf if best_len else 1.0)
    return p, d, best_instance if final > threshold else None


def random_view(rng, request):
    nodes = [f"prefill{i}" for i in range(rng.randrange(1, 6))]
    pool = KVCachePool(dict.fromkeys(nodes, 64))
    for node in nodes:
        blocks = pool.reserve(node, request.block_keys[: rng.choice([0, 0, 1, 2, 4, 8, 20])])
        pool.land(node, blocks)
        pool.release(node, blocks)
    queues = {
        node: PrefillQueue(
            {i: rng.choice([0.02, 0.1, 0.5]) for i in range(rng.randrange(4))},
            rng.choice([{}, {0: rng.uniform(9, 10)}]),
        )
        for node in nodes
    }
    loads = {}
    for node in [f"decode{i}" for i in range(rng.randrange(1, 4))]:
        loads[node] = DecodingLoad()
        for i in range(rng.randrange(3)):
            loads[node].add(i, rng.randrange(1000))
    slo = rng.choice([SLO(), SLO(ttft=rng.uniform(0.1, 1)), SLO(tbt=0.012)])
    return ClusterView(queues, loads, pool, COST, slo, BLOCK, BYTES_PER_TOKEN)


@pytest.mark.parametrize("seed", range(10))
def test_algorithm_1_on_random_states(seed):
    rng = random.Random(seed)
    for case in range(100):
        request = make_request(case, [rng.randrange(1000) for _ in range(rng.choice([5, 64, 320, 333]))])
        threshold = rng.choice([1.0, 1.5, 2.0, 4.0])
        view = random_view(rng, request)
        choice = KVCacheCentric(threshold).choose(request, view, 10.0)
        expected = algorithm_1(request, view, 10.0, threshold)
        if expected is None:
            assert not isinstance(choice, Dispatch), choice
        else:
            assert (choice.prefill, choice.decoding, choice.replicate_from) == expected


def test_queue_counts_what_is_left_of_the_running_prefill():
    queue = PrefillQueue({1: 2.0, 2: 3.0})
    assert queue.seconds(9.0) == pytest.approx(5.0)
    queue.begin(1, 2.0, now=10.0)
    assert queue.seconds(10.5) == pytest.approx(4.5)
    assert queue.seconds(99.0) == pytest.approx(3.0), "an overdue prefill counts nothing, not less"
    queue.begin(2, 1.0, now=11.0)
    assert queue.seconds(11.5) == pytest.approx(1.0), "in a pipeline several run at once"
    queue.end(1)
    assert queue.seconds(11.75) == pytest.approx(0.25)
