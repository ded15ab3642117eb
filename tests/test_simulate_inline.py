"""Inlined prefills in virtual time: first tokens come sooner under a light load, and nobody waits too long between
tokens.
"""

import math
import random

import pytest
from simulated import COST, make_config, make_request

from mooncake_jax.request import COMPLETED
from mooncake_jax.simulate.run import simulate

SLO = 0.25


def light_load(count=200):
    """Ten tokens of output at most, so that tbt_top10_s is the longest gap."""
    rng, at, requests = random.Random(1), 0.0, []
    for name in range(count):
        at += rng.expovariate(3.0)
        requests.append(make_request(name, rng.randrange(20, 300), at, rng.randrange(2, 11)))
    return requests


def served(**changes):
    config = make_config(prefill=1, prefill_chunk=200, tbt_slo=SLO, dram=1000, max_batch=16, **changes)
    return simulate(config, COST, light_load(), check=True)


def mean_ttft(run):
    return math.fsum(outcome.ttft_s for outcome in run.outcomes) / len(run.outcomes)


@pytest.mark.parametrize("admission", ["none", "slo", "baseline"])
def test_first_tokens_come_sooner_and_the_tbt_slo_is_kept(admission):
    apart, inline = served(admission=admission), served(admission=admission, inline_prefill=True)
    assert {outcome.status for outcome in inline.outcomes} == {COMPLETED}
    assert apart.inlined_prefills == 0 < 50 < inline.inlined_prefills
    assert mean_ttft(inline) < 0.9 * mean_ttft(apart)
    there = [outcome for outcome in inline.outcomes if outcome.prefill_instance == outcome.decoding_instance]
    assert len(there) == inline.inlined_prefills and max(outcome.prompt_tokens for outcome in there) <= 200
    assert max(outcome.tbt_top10_s for outcome in inline.outcomes) <= SLO
    assert inline.hardware["decoding_inlined_s"]["decode0"] == pytest.approx(
        math.fsum(COST.prefill_compute(outcome.prompt_tokens, 0) for outcome in there)
    )


def test_of_one_alone_the_first_token_comes_when_it_is_computed():
    config = make_config(inline_prefill=True, decision_s=0.05)
    [outcome] = simulate(config, COST, [make_request("a", 100, 1.0)], check=True).outcomes
    assert outcome.ttft_s == pytest.approx(0.05 + COST.prefill_compute(100, 0))
