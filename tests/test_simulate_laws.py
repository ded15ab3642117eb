"""What must hold of a long run whatever its policy: Little's law, utilisation, and work done = sum over requests."""

import math

import pytest
from simulated import BYTES_PER_TOKEN, COST, make_config, random_requests

from mooncake_jax.request import COMPLETED
from mooncake_jax.sched.messages import CONDUCTOR, PrefillDone, PrefillStarted, StepsDone
from mooncake_jax.simulate.group import GroupCost
from mooncake_jax.simulate.run import simulate

CONFIG = make_config(prefill=2, decode=2, dram=2000, max_batch=64, device_kv_tokens=100_000, admission="none")


class Watched:
    """Conductor, with the time integral of how many requests it has open."""

    def __init__(self, actor):
        self.actor, self.integral, self._since = actor, 0.0, 0.0

    def handle(self, message, now):
        self.integral += len(self.actor.open) * (now - self._since)
        self._since = now
        return self.actor.handle(message, now)


class Busy:
    """An instance, with the seconds from each start of its work to its end, as its own messages tell them."""

    def __init__(self, actor):
        self.actor, self.seconds, self._begun = actor, 0.0, None

    def handle(self, message, now):
        match message:
            case PrefillStarted():
                self._begun = now
            case PrefillDone():
                self.seconds += now - self._begun
            case StepsDone(_, ends):
                self.seconds += ends[-1] - self._begun
                self._begun = ends[-1]
        idle = not getattr(self.actor, "stepping", True)
        actions = self.actor.handle(message, now)
        if idle and self.actor.stepping:
            self._begun = now
        return actions


@pytest.fixture(scope="module")
def long_run():
    requests = random_requests(11, 3000, rate=3.0)
    watching = {}

    def host(node, actor):
        watching[node] = Watched(actor) if node == CONDUCTOR else Busy(actor)
        return watching[node]

    run = simulate(CONFIG, COST, requests, host=host)
    assert {outcome.status for outcome in run.outcomes} == {COMPLETED}
    return requests, run, watching


def test_littles_law(long_run):
    """Requests present on average = arrivals a second times the mean time that each is present."""
    requests, run, watching = long_run
    present = watching[CONDUCTOR].integral / run.duration_s
    decoding = [(o.tbt_mean_s or 0.0) * (o.output_tokens - 1) for o in run.outcomes]
    sojourn = math.fsum(o.ttft_s + seconds for o, seconds in zip(run.outcomes, decoding)) / len(requests)
    assert present == pytest.approx(len(requests) / run.duration_s * sojourn, rel=1e-9)
    assert present > 1


def test_utilisation_is_what_the_instances_tell_of_their_work(long_run):
    _, run, watching = long_run
    for node in CONFIG.prefill_nodes:
        busy = run.hardware["prefill_busy_s"][node][0]
        assert busy == pytest.approx(watching[node].seconds, rel=1e-9) and 0 < busy < run.duration_s
    for node in CONFIG.decoding_nodes:
        busy = run.hardware["decoding_busy_s"][node]
        assert busy == pytest.approx(watching[node].seconds, rel=1e-9) and 0 < busy < run.duration_s


def test_work_done_is_the_sum_over_requests(long_run):
    _, run, _ = long_run
    cost = GroupCost(CONFIG, COST)
    for node in CONFIG.prefill_nodes:
        there = [o for o in run.outcomes if o.prefill_instance == node]
        seconds = math.fsum(cost.on_node(o.prompt_tokens, o.reused_tokens) for o in there)
        assert run.hardware["prefill_busy_s"][node][0] == pytest.approx(seconds, rel=1e-9)
    for node in CONFIG.decoding_nodes:
        there = [o for o in run.outcomes if o.decoding_instance == node]
        assert run.hardware["decoding_tokens"][node] == sum(o.output_tokens - 1 for o in there)
    sent = sum(run.hardware["sent_bytes"].values())
    streamed = sum(o.prompt_tokens for o in run.outcomes) * BYTES_PER_TOKEN
    copied = sent - streamed
    block = CONFIG.block_size * BYTES_PER_TOKEN
    assert copied >= 0 and copied % block == 0
