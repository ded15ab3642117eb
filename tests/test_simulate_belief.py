"""What Conductor believes of the simulated hardware, by the estimates in its rejections: what one instance alone takes,
unless it is given another cost model. And many steps at once for admissions that look at all instances.
"""

import pytest
from simulated import COST, LAYERS, RATE, by_id, make_config, make_request, outcomes, random_requests

from mooncake_jax.request import REJECTED
from mooncake_jax.sched.admission import Admission
from mooncake_jax.sched.cost import PolynomialCost
from mooncake_jax.sched.decisions import Reject
from mooncake_jax.simulate.group import GroupCost, PrefillGroup
from mooncake_jax.simulate.run import simulate

LINEAR = PolynomialCost((0.0, 1e-3, 0.0), (0.01, 0.0, 0.0), (0.0, 0.0))


def estimate(tokens=40, cost=COST, believed=None, slo="ttft_slo", **changes):
    """Of the TTFT or TBT of a request alone, which no cluster meets."""
    config = make_config(**{slo: 1e-9, "admission": "slo"} | changes)
    [outcome] = simulate(config, cost, [make_request("a", tokens)], believed=believed).outcomes
    assert outcome.status == REJECTED
    return outcome.estimate


def test_a_prefill_is_believed_to_take_what_it_takes_layer_by_layer():
    assert estimate(40) == pytest.approx(COST.prefill_compute(40, 0) + COST.load(40_000) / LAYERS, rel=1e-12)


def test_without_overlap_and_on_shared_cores_it_is_what_the_cost_model_says():
    assert estimate(40, without=frozenset({"overlap"})) == COST.prefill(40, 0)
    assert estimate(40, cores=2.0) == COST.prefill(40, 0)


def test_of_a_pipeline_it_is_what_all_chunks_take():
    """Three stages, four chunks: six ticks of a third of a chunk's time."""
    pipeline = {"prefill": 1, "stages": 3, "prefill_chunk": 100}
    assert estimate(400, LINEAR, **pipeline) == pytest.approx(6 * 0.1 / 3, rel=1e-12)


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize(("tokens", "prefix"), [(40, 0), (100, 30), (730, 160), (730, 0), (101, 0)])
def test_an_instance_alone_takes_what_is_believed(stages, tokens, prefix):
    config = make_config(stages=stages, prefill_chunk=100)
    begun, done = PrefillGroup(config, COST).run(tokens, prefix, 0.0)
    assert begun == 0.0 and GroupCost(config, COST).prefill(tokens, prefix) == pytest.approx(done, rel=1e-12)


def test_a_decoding_instance_is_believed_to_inline_as_one_node_does():
    believed = GroupCost(make_config(stages=4), COST)
    assert believed.prefill_compute(100, 0) == COST.prefill_compute(100, 0)


def test_copies_are_believed_to_go_at_the_rate_of_the_nics():
    def transfer(flows=1, **changes):
        return GroupCost(make_config(**changes), COST).transfer(1_000_000, flows)

    assert transfer() == COST.transfer(1_000_000) == pytest.approx(1_000_000 / RATE)
    assert transfer(flows=3) == COST.transfer(1_000_000, 3)
    assert transfer(link_bytes_per_s=1e6) == 1.0 and transfer(flows=3, link_bytes_per_s=1e6) == 3.0
    assert transfer(stages=4, link_bytes_per_s=1e6) == 0.25
    assert transfer(flows=3, link_bytes_per_s=1e6, without=frozenset({"sharing"})) == 1.0
    assert transfer(link_bytes_per_s=1e6, without=frozenset({"network"})) == 0.0


@pytest.mark.parametrize("rate", [RATE, 1.5e6, 1e9])
def test_the_last_layer_goes_at_the_rate_of_the_nics(rate):
    """All others have arrived by then."""
    outcome = outcomes([make_request("a", 40)], link_bytes_per_s=rate)["a"]
    prefill = COST.prefill_compute(40, 0) + COST.load(40_000) / LAYERS
    assert outcome.ttft_s == pytest.approx(prefill + 4_000 / rate + COST.load(40_000), rel=1e-12)


def test_conductor_may_believe_another_cost_model():
    other = PolynomialCost((0.0, 2.0, 0.0), (3.0, 0.0, 0.0), (0.0, 1 / RATE))
    assert estimate(40, believed=other) == 80.0 and estimate(40, believed=other, slo="tbt_slo") == 3.0
    assert estimate(40, slo="tbt_slo") == COST.step(1, 40)
    requests = random_requests(4, 60)
    same, wrong = (
        by_id(simulate(make_config(prefill=1, admission="none"), COST, requests, believed=believed))
        for believed in (None, other)
    )
    assert same == wrong, "the hardware is the same, and there is nothing to choose"


class CrowdedAnywhere(Admission):
    """Judges a prompt that has been prefilled by the KVCache of all decoding instances, to the token."""

    def on_prefilled(self, request, decoding, view, now):
        context = sum(load.context for load in view.decoding.values())
        return Reject("crowded", float(context), 0.0) if context % 3 == 0 else None


@pytest.mark.parametrize(
    "changes",
    [
        {"coupled": 3, "policy": "load-balancing"},
        {"decode": 3, "inline_prefill": True, "tbt_slo": 1.0},
        {"prefill": 3, "elastic_roles": True, "elastic_after_s": 0.1, "tbt_slo": 0.014, "recheck": False},
    ],
    ids=["coupled", "inlined", "elastic"],
)
def test_skipping_changes_nothing_for_who_looks_at_all_instances_when_a_prefill_ends(changes):
    for seed in range(4):
        requests = random_requests(seed, 60, rate=12.0)
        skipping, single = (
            simulate(
                make_config(
                    admission="test_simulate_belief:CrowdedAnywhere", ttft_slo=5.0, single_steps=steps, **changes
                ),
                COST,
                requests,
            )
            for steps in (False, True)
        )
        assert by_id(skipping) == by_id(single)
        rejected = sum(outcome.status == REJECTED for outcome in skipping.outcomes)
        assert 5 < rejected < 55
