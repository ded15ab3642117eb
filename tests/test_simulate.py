"""The simulated cluster: times against closed forms, endings, reuse, tiers, and the same run every time."""

import json
import math
import random
import subprocess
import sys

import pytest
from simulated import BLOCK, BYTES_PER_TOKEN, COST, LAYERS, RATE, by_id, make_config, make_request, outcomes
from simulated import random_requests as some

from mooncake_jax.cluster.record import Recorded, decode, digest
from mooncake_jax.request import COMPLETED, FAILED, REJECTED
from mooncake_jax.sched.cost import PolynomialCost
from mooncake_jax.simulate.actors import make_actors
from mooncake_jax.simulate.group import GroupCost
from mooncake_jax.simulate.run import simulate


def layer_wise(tokens, prefix=0):
    """Seconds of a prefill."""
    compute = COST.prefill_compute(tokens, prefix)
    load = COST.load(prefix * BYTES_PER_TOKEN) if prefix else 0.0
    store = COST.load((tokens - prefix) * BYTES_PER_TOKEN)
    return max(compute, load, store) + (load + store) / LAYERS


def test_one_request_takes_what_the_cost_model_says():
    outcome = outcomes([make_request("a", 40, arrival=1.0)], decision_s=0.05)["a"]
    nbytes = 40 * BYTES_PER_TOKEN
    ttft = 0.05 + layer_wise(40) + nbytes / LAYERS / RATE + COST.load(nbytes)
    assert (outcome.status, outcome.reason, outcome.output_tokens, outcome.reused_tokens) == (COMPLETED, None, 4, 0)
    assert outcome.ttft_s == pytest.approx(ttft, rel=1e-12)
    steps = [COST.step(1, 41 + step) for step in range(3)]
    assert outcome.tbt_mean_s == pytest.approx(math.fsum(steps) / 3, rel=1e-12)
    assert outcome.token_ids is None


@pytest.mark.parametrize(
    ("without", "ttft"),
    [
        (("overlap",), COST.prefill(40, 0) + 40 * BYTES_PER_TOKEN / RATE + COST.load(40 * BYTES_PER_TOKEN)),
        (("overlap", "network", "loading"), COST.prefill(40, 0)),
        (("network", "loading", "storing"), COST.prefill(40, 0)),
        (("storing", "loading"), COST.prefill(40, 0) + 40 * BYTES_PER_TOKEN / LAYERS / RATE),
    ],
)
def test_parts_of_the_hardware_can_be_left_out(without, ttft):
    outcome = outcomes([make_request("a", 40)], without=frozenset(without))["a"]
    assert outcome.ttft_s == pytest.approx(ttft, rel=1e-12)


def test_a_slow_link_decides_when_decoding_begins():
    slow = 1e5
    outcome = outcomes([make_request("a", 40)], link_bytes_per_s=slow)["a"]
    assert outcome.ttft_s == pytest.approx(40 * BYTES_PER_TOKEN / slow + COST.load(40 * BYTES_PER_TOKEN), rel=1e-9)


def test_transfers_share_the_receivers_link():
    """Two prefill instances send to one decoding instance at once."""
    requests = [make_request("a", 40), make_request("b", 40)]
    shared = outcomes(requests, link_bytes_per_s=1e5)
    alone = outcomes(requests, link_bytes_per_s=1e5, without=frozenset({"sharing"}))
    assert {o.prefill_instance for o in shared.values()} == {"prefill0", "prefill1"}
    assert min(o.ttft_s for o in shared.values()) == pytest.approx(0.8 + COST.load(40_000), rel=1e-6)
    assert min(o.ttft_s for o in alone.values()) == pytest.approx(0.4 + COST.load(40_000), rel=1e-6)


def test_prefills_without_reuse_sum_to_the_cost_model_exactly():
    requests = [make_request(i, 100 + 7 * i, output=1) for i in range(50)]
    run = simulate(make_config(prefill=1, without=frozenset({"overlap"})), COST, requests)
    expected = 0.0
    for request in requests:
        expected += COST.prefill(request.prompt_tokens, 0)
    assert run.hardware["prefill_busy_s"]["prefill0"] == [expected]


def test_reuse_spares_computation():
    requests = [make_request("a", 160, chain="c", shared=10), make_request("b", 200, 100.0, chain="c", shared=10)]
    found = outcomes(requests, without=frozenset({"network", "loading"}))
    assert found["b"].reused_tokens == 160 and found["b"].prefill_instance == found["a"].prefill_instance
    store = COST.load(40 * BYTES_PER_TOKEN)
    assert found["b"].ttft_s == pytest.approx(COST.prefill_compute(200, 160) + store / LAYERS, rel=1e-9)


def test_what_leaves_dram_comes_back_from_the_ssd():
    requests = [
        make_request("a", 160, chain="c", shared=10),
        make_request("others", 190, 100.0),
        make_request("again", 160, 200.0, chain="c", shared=10),
    ]
    with_ssd = outcomes(requests, prefill=1, dram=12, ssd=100)
    assert with_ssd["again"].reused_tokens == 159
    assert outcomes(requests, prefill=1, dram=12)["again"].reused_tokens < 32
    read = COST.read_ssd(9 * BLOCK * BYTES_PER_TOKEN)
    free = outcomes(requests, prefill=1, dram=12, ssd=100, without=frozenset({"ssd"}))
    assert with_ssd["again"].ttft_s - free["again"].ttft_s == pytest.approx(read, rel=0.2)


def test_a_pipeline_passes_chunks_on():
    """Three stages, four chunks: six ticks of a third of a chunk's time; the next prompt follows after four."""
    requests = [make_request(i, 400, output=1) for i in range(3)]
    without = frozenset({"overlap", "network", "loading"})
    linear = PolynomialCost((0.0, 1e-3, 0.0), (0.01, 0.0, 0.0), (0.0, 0.0))
    found = outcomes(requests, cost=linear, prefill=1, stages=3, prefill_chunk=100, dram=1000, without=without)
    tick = 0.1 / 3
    assert [found[str(i)].ttft_s for i in range(3)] == pytest.approx([6 * tick, 10 * tick, 14 * tick], rel=1e-9)


def test_conductor_believes_of_a_pipeline_what_it_takes():
    linear = PolynomialCost((0.0, 1e-3, 0.0), (0.01, 0.0, 0.0), (0.0, 0.0))
    for tokens in (90, 400):
        config = make_config(prefill=1, stages=3, prefill_chunk=100, without=frozenset({"overlap", "network"}))
        found = by_id(simulate(config, linear, [make_request("a", tokens, output=1)]))
        assert found["a"].ttft_s == pytest.approx(GroupCost(config, linear).prefill(tokens, 0), rel=1e-9)


def test_single_server_queue_waits_as_theory_says():
    """M/D/1: the mean wait is rho S / (2 (1 - rho))."""
    rng, at, requests = random.Random(3), 0.0, []
    service = COST.prefill(100, 0)
    for i in range(20_000):
        at += rng.expovariate(0.6 / service)
        requests.append(make_request(i, 100, at, output=1))
    config = make_config(prefill=1, dram=8, without=frozenset({"overlap", "network", "loading"}), max_batch=64)
    run = simulate(config, COST, requests)
    waits = [outcome.ttft_s - service for outcome in run.outcomes]
    assert math.fsum(waits) / len(waits) == pytest.approx(0.6 * service / (2 * 0.4), rel=0.03)
    assert run.hardware["prefill_busy_s"]["prefill0"][0] / run.duration_s == pytest.approx(0.6, rel=0.03)


def test_requests_that_fit_nowhere_are_rejected_and_the_rest_runs():
    requests = [make_request("large", 2000), make_request("empty", 0), make_request("mute", 50, output=0)]
    found = outcomes([*requests, make_request("small", 50)])
    assert found["large"].reason == "its 2004 tokens of KVCache exceed the 1024 that a decoding instance holds"
    assert found["empty"].reason == "the prompt is empty"
    assert found["mute"].reason == "its output is 0 tokens: it must be at least 1"
    assert [found[name].status for name in ("large", "empty", "mute", "small")] == [REJECTED] * 3 + [COMPLETED]


def test_expired_requests_keep_what_they_got():
    requests = [make_request(i, 60, output=40) for i in range(8)]
    found = outcomes(requests, request_timeout=0.3, dram=1000)
    assert {outcome.status for outcome in found.values()} == {FAILED}
    assert any(0 < outcome.output_tokens < 40 for outcome in found.values())


def test_an_empty_run_ends_at_once():
    run = simulate(make_config(), COST, [])
    assert (run.duration_s, run.outcomes) == (0.0, [])


@pytest.mark.parametrize("admission", ["none", "baseline", "slo", "early", "early-predicted", "request-level"])
def test_every_request_ends_once_and_all_invariants_hold(admission):
    requests = some(1, 80, rate=20.0)
    found = outcomes(requests, admission=admission, ttft_slo=1.0, tbt_slo=0.014, decode=2, ssd=40)
    assert found.keys() == {request.id for request in requests}
    if admission != "none":
        assert REJECTED in {outcome.status for outcome in found.values()}


def test_a_recorded_run_handled_again_gives_the_same_actions():
    lines = []
    config = make_config(ssd=40, tbt_slo=0.014, admission="early-predicted")

    def host(node, actor):
        return Recorded(node, actor, lambda line: lines.append(json.loads(line)))

    simulate(config, COST, some(2, 60), host=host)
    fresh = make_actors(config, COST)
    for line in lines:
        actions = fresh[line["node"]].handle(decode(line["message"]), line["now"])
        assert digest(actions) == line["actions"]
    assert len(lines) > 600


# Several kinds of runs: their outcomes, what tells that they were of that kind, and all messages and actions.
EQUAL_RUNS = """
import hashlib, json, sys
sys.path.insert(0, "tests")
from simulated import *
from mooncake_jax.cluster.record import Recorded
from mooncake_jax.metrics import outcome_row

coupled = {"coupled": 2, "coupled_mode": "prefix_cache", "policy": "load-balancing", "admission": "none"}
elastic = {"elastic_roles": True, "elastic_after_s": 0.2, "ttft_slo": 0.5, "tbt_slo": 0.014, "prefill": 3}
inline = {"inline_prefill": True, "prefill_chunk": 200, "tbt_slo": 0.25, "device_kv_tokens": 1 << 16, "max_batch": 64}
inline |= {"prefill": 1, "decode": 2, "policy": "cache-aware"}
for changes in ({"policy": "random", "seed": 3, "ssd": 40}, elastic, inline, coupled):
    record = hashlib.sha256()
    run = simulate(make_config(**changes), COST, random_requests(5, 100, 12.0), host=lambda node, actor: Recorded(
        node, actor, lambda line: record.update(line.encode())))
    rows = [outcome_row(o) for o in run.outcomes]
    print(json.dumps([len(rows), run.roles, run.inlined_prefills, rows, record.hexdigest()]))
"""


def test_equal_seeds_give_equal_bytes_in_every_process():
    printed = set()
    for hash_seed in ("0", "1"):
        environment = {"PYTHONHASHSEED": hash_seed, "PATH": "/usr/bin:/bin"}
        done = subprocess.run([sys.executable, "-c", EQUAL_RUNS], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        printed.add(done.stdout)
    [plain, elastic, inline, coupled] = [json.loads(line) for line in printed.pop().splitlines()]
    assert not printed
    assert [run[0] for run in (plain, elastic, inline, coupled)] == [100] * 4
    assert elastic[1]["to_decoding"] > 0
    assert inline[2] > 9
    assert any(row["reused_tokens"] for row in coupled[3])
