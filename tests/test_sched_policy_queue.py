"""T_queue: pipelines whose prefills overlap, and estimates that what really happened corrects."""

import random
from math import fsum

import pytest
from virtual_cluster import BLOCK, COST, VirtualCluster, make_actors, make_request

from mooncake_jax.sched.admission import SLOCheck
from mooncake_jax.sched.decoding import DecodingLimits
from mooncake_jax.sched.kvcache_centric import KVCacheCentric
from mooncake_jax.sched.messages import CONDUCTOR, KVCacheReceived, PrefillDone, PrefillStarted
from mooncake_jax.sched.pace import Pace
from mooncake_jax.sched.prefill_queue import PrefillQueue
from mooncake_jax.sched.scheduler import Scheduler
from mooncake_jax.sched.serve import serve

ROOMY = DecodingLimits(max_batch=64, pages=100_000, page_size=BLOCK)


def test_one_prefill_at_a_time():
    queue = PrefillQueue()
    queue.add(1, 100, 2.0)
    queue.add(2, 100, 3.0)
    assert (queue.seconds(9.0), len(queue)) == (5.0, 2)
    queue.begin(1, 100, 2.5, now=10.0)  # it reuses less than was thought
    assert queue.seconds(10.5) == 5.0
    assert queue.seconds(99.0) == 3.0, "an overdue prefill counts nothing, not less"
    queue.end(1, now=12.5)
    queue.begin(2, 100, 3.0, now=12.5)
    assert queue.seconds(13.5) == 2.0
    queue.drop(2)
    assert (queue.seconds(13.5), len(queue)) == (0.0, 0)


def test_in_a_pipeline_only_the_entrance_counts():
    """Three stages, chunks of 100 tokens in ticks of 1 s: 4 chunks take 6 ticks, but the next prompt enters after 4."""
    queue = PrefillQueue(stages=3, prefill_chunk=100)
    queue.add(1, 400, 6.0)
    queue.add(2, 120, 4.0)  # two chunks
    queue.add(3, 50, 3.0)  # one
    assert queue.seconds(0.0) == pytest.approx(4 + 2 + 1), "not the 13 s that their latencies add up to"
    queue.begin(1, 400, 6.0, now=0.0)
    assert queue.seconds(1.0) == pytest.approx(3 + 2 + 1)
    queue.begin(2, 120, 4.0, now=1.0)  # it waits at the entrance
    assert queue.seconds(1.0) == pytest.approx(3 + 2 + 1)
    assert queue.seconds(4.5) == pytest.approx(1.5 + 1)
    queue.end(1, now=6.0)
    assert queue.pace.factor == pytest.approx(1.0), "it took the 6 s it should"
    assert queue.seconds(6.0) == pytest.approx(1)
    queue.end(2, now=8.0)
    assert queue.pace.factor == pytest.approx(1.0), "it entered at 4 s, not when it began to wait"


def test_a_late_end_moves_those_behind_it():
    queue = PrefillQueue(stages=2, prefill_chunk=100)
    queue.begin(1, 300, 4.0, now=0.0)  # was never added: ignored
    assert len(queue) == 0
    for number in (1, 2):
        queue.add(number, 300, 4.0)
        queue.begin(number, 300, 4.0, now=0.0)
    assert queue.seconds(0.0) == pytest.approx(6.0)
    queue.end(1, now=8.0)  # twice as long
    pace = queue.pace.factor
    assert 1.4 < pace < 1.6
    assert queue.seconds(8.0) == pytest.approx(pace * 3.0 - pace * 1.0), "it entered a tick before the first one's end"


def test_a_pace_weighs_seconds_and_forgets():
    pace = Pace()
    pace.learn(1.0, 2.0)
    assert pace.factor == pytest.approx((0.9 + 2.0) / 1.9)
    for _ in range(50):
        pace.learn(0.01, 0.1)  # short ones are off by a constant
        pace.learn(10.0, 10.0)
    assert pace.factor == pytest.approx(1.0, abs=0.02)
    for _ in range(50):
        pace.learn(1.0, 3.0)
    assert pace.factor == pytest.approx(3.0, rel=0.02)
    pace.learn(1.0, 1e9)
    assert pace.factor < 3.6, "one that hung does not count for more than eight times"
    pace.learn(0.0, 5.0)
    assert pace.factor < 3.6
    for _ in range(200):
        pace.learn(1.0, 0.0)
    assert pace.factor == pytest.approx(1 / 8), "nor one that took no time for less than an eighth"


def test_random_histories_keep_the_invariants():
    rng = random.Random(3)
    for stages in (1, 2, 5):
        queue, now, number = PrefillQueue(stages, 64), 0.0, 0
        waiting, running = [], []
        for _ in range(400):
            now += rng.expovariate(2.0)
            happens = rng.choice(["add", "begin", "end", "drop"])
            if happens == "add":
                queue.add(number, rng.randrange(1, 500), rng.uniform(0.01, 2))
                waiting.append(number)
                number += 1
            elif happens == "begin" and waiting:
                running.append(waiting.pop(0))
                queue.begin(running[-1], rng.randrange(1, 500), rng.uniform(0.01, 2), now)
            elif happens == "end" and running:
                queue.end(running.pop(0), now)
            elif happens == "drop" and waiting:
                queue.drop(waiting.pop())
            queue.check()
            assert queue.seconds(now) >= 0.0
            assert len(queue) == len(waiting) + len(running)


class Predicting:
    """The policy, and what it predicted."""

    def __init__(self):
        self.ttft, self._policy = {}, KVCacheCentric()

    def choose(self, request, view, now):
        decision = self._policy.choose(request, view, now)
        self.ttft[request.id] = decision.ttft
        return decision


class SlowCluster(VirtualCluster):
    """Every prefill takes `factor` times its estimate. Of each instance's pipeline the chunks follow one another."""

    def __init__(self, actors, requests, factor, stages, chunk):
        super().__init__(actors, requests)
        self.factor, self.stages, self.chunk = factor, stages, chunk
        self.free = {}

    def _prefill(self, node, run, now):
        request = run.request
        reused = min(run.reuse * BLOCK, request.prompt_tokens - 1)
        chunks = -(-(request.prompt_tokens - reused) // self.chunk)
        seconds = self.factor * COST.prefill(request.prompt_tokens, reused)
        enters = max(now, self.free.get(node, 0.0))
        self.free[node] = enters + seconds * chunks / (chunks + self.stages - 1)
        self.push(enters, node, PrefillStarted(run.dispatch, node, reused))
        stored = tuple(run.blocks[i] for i in run.missing)
        self.push(enters + seconds, node, PrefillDone(run.dispatch, node, reused, seconds, stored))
        self.push(enters + seconds, run.decoding, KVCacheReceived(run.dispatch, request, 5))


def arrivals(count, rate):
    """Bursts of four: T_queue is most of their TTFT."""
    rng, at = random.Random(5), 0.0
    for number in range(count):
        if number % 4 == 0:
            at += rng.expovariate(rate / 4)
        prompt = [rng.randrange(1000) for _ in range(rng.randrange(200, 1200))]
        yield make_request(number, prompt, arrival=at, output_length=2)


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("factor", [1.5, 0.6])
def test_the_mean_ttft_estimate_converges_to_what_happens(stages, factor):
    policy = Predicting()
    chunk = 128
    actors = make_actors(prefill=2, slots=200, limits=ROOMY, stages=stages, scheduler=Scheduler(policy, SLOCheck()))
    for node, queue in actors[CONDUCTOR].view.prefill.items():
        actors[CONDUCTOR].view.prefill[node] = type(queue)(stages, chunk)
    requests = list(arrivals(140, rate=1.6 / factor * (1 if stages == 1 else 1.5)))
    cluster = SlowCluster(actors, requests, factor, stages, chunk)
    serve(actors, cluster)
    assert fsum(o.ttft_s for o in cluster.outcomes.values()) > 1.5 * factor * fsum(
        COST.prefill(request.prompt_tokens, 0) for request in requests
    ), "there was something to queue for"

    def estimate(first, last):
        """Mean estimate over mean TTFT, of these requests."""
        names = [request.id for request in requests[first:last]]
        return fsum(policy.ttft[n] for n in names) / fsum(cluster.outcomes[n].ttft_s for n in names)

    assert abs(estimate(0, 4) - 1) > 0.25, "it was wrong at first"
    assert estimate(0, 140) == pytest.approx(1, abs=0.1), "of the whole run"
    assert [estimate(first, first + 20) for first in range(20, 140, 20)] == pytest.approx([1] * 6, abs=0.1)
    assert estimate(120, 140) == pytest.approx(1, abs=0.03)
