"""Prefills in batches, prefixes that any node sends, and NICs that receive at a rate of their own."""

import pytest
from simulated import BLOCK, BYTES_PER_TOKEN, COST, make_config, make_request, random_requests
from test_simulate_network import RATES, arrivals

from mooncake_jax.commands.simulate_flags import parse
from mooncake_jax.errors import UsageError
from mooncake_jax.simulate.run import simulate

ALONE = frozenset({"overlap", "network", "loading", "storing"})


def served(requests, **changes):
    return simulate(make_config(**{"prefill": 1, "dram": 256} | changes), COST, requests, check=True)


def ttfts(run):
    return [outcome.ttft_s for outcome in sorted(run.outcomes, key=lambda outcome: int(outcome.id))]


@pytest.mark.parametrize(("budget", "together"), [(None, [2, 3, 4]), (90, [2, 3]), (1, [2])])
def test_all_that_wait_are_prefilled_together_up_to_the_budget(budget, together):
    requests = [make_request(name, 50, output=1) for name in (1, 2, 3, 4)]
    ends = ttfts(served(requests, batched_prefill=True, token_budget=budget, without=ALONE))
    each = COST.prefill(50, 0)
    assert ends[0] == pytest.approx(each)
    assert ends[1 : 1 + len(together)] == pytest.approx([each * (1 + len(together))] * len(together))
    assert ends[-1] == pytest.approx(4 * each)


def test_what_is_reused_takes_nothing_of_the_budget():
    first = make_request(0, 6 * BLOCK + 1, chain="c", shared=6)
    later = [make_request(name, 6 * BLOCK + 10, 5.0, 1, "c", 6) for name in (1, 2, 3)]
    ends = ttfts(served([first, *later], batched_prefill=True, token_budget=11, without=ALONE))
    assert ends[2] == ends[3] > ends[1]


def test_any_node_sends_the_reused_prefix_and_the_prefill_node_the_rest():
    prefix, rest = 6 * BLOCK, 10
    requests = [make_request(name, prefix + rest, 10.0 * name, chain="c", shared=6) for name in range(20)]
    tokens = {}
    for senders in ("prefill", "any"):
        run = served(requests, decode=3, prefix_senders=senders)
        tokens[senders] = {node: sent // BYTES_PER_TOKEN for node, sent in run.hardware["sent_bytes"].items()}
    assert tokens["prefill"] == {"prefill0": 20 * (prefix + rest)}
    assert sum(tokens["any"].values()) == 20 * (prefix + rest)
    assert set(tokens["any"]) == {"prefill0", "decode1", "decode2"}  # all are decoded at decode0
    assert all(sent % prefix == 0 for node, sent in tokens["any"].items() if node != "prefill0")


def test_who_sends_is_drawn_by_the_seed():
    requests = random_requests(1, 40)
    sent = [served(requests, decode=3, prefix_senders="any", seed=seed).hardware["sent_bytes"] for seed in (1, 1, 2)]
    assert sent[0] == sent[1] != sent[2]


def test_both_parts_have_arrived_before_it_decodes():
    """A token a second: the prefix, and the rest beside it through the same NICs."""
    prefix = 6 * BLOCK
    requests = [make_request(name, prefix + 1, 1000.0 * name, 1, "c", 6) for name in range(2)]
    run = served(requests, prefix_senders="any", link_bytes_per_s=BYTES_PER_TOKEN, without=frozenset({"overlap"}))
    assert ttfts(run)[1] == pytest.approx(prefix + 1, rel=0.02)


def test_a_nic_may_receive_more_than_it_sends():
    both = [("a", "c", 100, 0.0), ("b", "c", 100, 0.0)]
    assert arrivals(both, RATES) == [50.0, 50.0]
    assert arrivals(both, RATES, receiving=dict.fromkeys(RATES, 30.0)) == [10.0, 10.0]
    assert arrivals(both, RATES, receiving=dict.fromkeys(RATES, 10.0)) == [20.0, 20.0]


@pytest.mark.parametrize("seed", range(3))
def test_batches_from_everywhere_keep_all_invariants(seed):
    changes = {"prefill": 3, "decode": 2, "dram": 96, "batched_prefill": True, "token_budget": 200}
    rates = {"link_bytes_per_s": 3e6, "receive_bytes_per_s": 5e6}
    run = served(random_requests(seed, 60), prefix_senders="any", seed=seed, **changes, **rates)
    assert {outcome.status for outcome in run.outcomes} == {"completed"}


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--batched_prefill", "--prefill=2x2"], "--prefill=2x2: a pipeline takes on one prompt after another"),
        (["--batched_prefill", "--coupled=2"], "--batched_prefill=True: --coupled=2 instances have no such part"),
        (["--prefix_senders=any", "--cores=2"], "--prefix_senders=any: with --cores nodes are not modelled"),
        (["--token_budget=9"], "--token_budget=9: it is for --coupled=N"),
        (["--receive_gbps=0"], "--receive_gbps=0.0: it must be above 0"),
        (["--receive_gbps=inf"], "--receive_gbps=inf: it must be a finite number"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags, complaint):
    with pytest.raises(UsageError, match=f"^{complaint}"):
        parse(["--trace=x.jsonl", *flags])


def test_flags_ask_for_it():
    config = parse(["--trace=x", "--batched_prefill", "--token_budget=9", "--prefix_senders=any", "--receive_gbps=8"])
    assert (config.batched_prefill, config.token_budget, config.prefix_senders) == (True, 9, "any")
    assert config.receive_bytes_per_s == 1e9
