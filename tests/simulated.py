"""Small simulated clusters for the tests."""

import random

from mooncake_jax.request import Request
from mooncake_jax.sched.cost import PolynomialCost
from mooncake_jax.simulate.config import SimulationConfig
from mooncake_jax.simulate.run import simulate

BLOCK = 16
BYTES_PER_TOKEN, LAYERS = 1000, 10
RATE = 1e8  # of a NIC, bytes a second
COST = PolynomialCost(
    prefill_coefficients=(0.01, 1e-3, 1e-7),
    prefix_coefficients=(0.02, 1e-5),
    step_coefficients=(0.01, 1e-3, 1e-6),
    transfer_coefficients=(0.0, 1 / RATE),
    flow_coefficients=(0.0, 1 / RATE),
    load_coefficients=(1e-3, 1e-9),
    ssd_read_coefficients=(1e-4, 1e-8),
    ssd_write_coefficients=(1e-4, 2e-8),
)


def make_config(**changes):
    blocks = {name: changes.pop(name, default) for name, default in (("dram", 64), ("ssd", 0))}
    sizes = {f"{name}_bytes": count * BLOCK * BYTES_PER_TOKEN for name, count in blocks.items()}
    defaults = {"prefill": 2, "decode": 1, "block_size": BLOCK, "device_kv_tokens": 64 * BLOCK, "max_batch": 4}
    return SimulationConfig(BYTES_PER_TOKEN, LAYERS, **defaults | sizes | changes)


def make_request(name, tokens, arrival=0.0, output=4, chain="", shared=0, **fields):
    """Blocks of its own, but for the leading `shared` ones, which are those of a chain."""
    keys = [f"{chain if place < shared else name}/{place}".encode() for place in range(tokens // BLOCK)]
    return Request(str(name), arrival, tokens, output, block_keys=tuple(keys), ignore_eos=True, **fields)


def random_requests(seed, count, rate=8.0):
    """Poisson arrivals; of four chains, of which each request has some leading blocks."""
    rng = random.Random(seed)
    requests, at = [], 0.0
    for name in range(count):
        at += rng.expovariate(rate)
        shared = rng.randrange(0, 25)
        tokens = shared * BLOCK + rng.randrange(1, 120)
        chain = f"chain{rng.randrange(4)}"
        requests.append(make_request(name, tokens, at, rng.randrange(1, 60), chain, shared))
    return requests


def by_id(run):
    return {outcome.id: outcome for outcome in run.outcomes}


def outcomes(requests, cost=COST, check=True, **changes):
    return by_id(simulate(make_config(**changes), cost, requests, check=check))
