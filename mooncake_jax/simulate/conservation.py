"""Conservation in a run of the simulated cluster: what its actors asked of the hardware, what that did, and what came
out at the end belong together. Checked after a run with --check.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mooncake_jax.request import COMPLETED, Outcome, Request
from mooncake_jax.sched.actions import Action, FetchBlocks, LoadKVCache, RunPrefill, RunPrefillBatch
from mooncake_jax.sched.cost import CostModel
from mooncake_jax.simulate.cluster import SimulatedCluster
from mooncake_jax.simulate.config import SimulationConfig

_ROUNDING = 1e-9  # relative: of sums of floats in another order
_ROUNDED_BYTES = 1.0  # of a little that was carried: rates times what times are rounded by


@dataclass(slots=True)
class Asked:
    """Of all nodes' hardware. prompt_tokens: of prefills; blocks: to be copied; loaded_tokens: to move to devices."""

    prompt_tokens: int = 0
    last_layers: int = 0  # bytes of the prompts' last layers
    blocks: int = 0
    loaded_tokens: int = 0

    def add(self, actions: Iterable[Action], config: SimulationConfig) -> None:
        for action in actions:
            if isinstance(action, RunPrefill):
                tokens = action.request.prompt_tokens
                self.prompt_tokens += tokens
                self.last_layers += tokens * config.bytes_per_token // config.layers
            elif isinstance(action, RunPrefillBatch):
                self.add(action.prefills, config)
            elif isinstance(action, FetchBlocks):
                self.blocks += len(action.replication.target_blocks)
            elif isinstance(action, LoadKVCache):
                self.loaded_tokens += action.request.prompt_tokens


def check_conserved(
    config: SimulationConfig,
    cost: CostModel,
    requests: Sequence[Request],
    outcomes: Sequence[Outcome],
    asked: Asked,
    cluster: SimulatedCluster,
) -> None:
    """Assert that nothing came of nothing, and that nothing was lost."""
    assert cluster.network.idle, "a transfer never ended"
    assert cluster.cores is None or cluster.cores.idle, "a computation never ended"
    _check_bytes(config, asked, cluster)
    _check_tokens(requests, outcomes, cluster)
    if cluster.coupled:
        prompts = sum(o.prompt_tokens - o.reused_tokens for o in outcomes if o.output_tokens)
        prefilled = sum(hardware.prefilled for hardware in cluster.coupled.values())
        assert prompts <= prefilled, f"{prompts} tokens of prompts came of {prefilled}"
        assert prompts == prefilled or not _all_completed(outcomes), f"{prefilled} tokens of {prompts} were prefilled"
    elif config.cores is None:  # there inlined prefills count with what they waited for a core
        _check_work(cost, outcomes, cluster)


def _check_bytes(config: SimulationConfig, asked: Asked, cluster: SimulatedCluster) -> None:
    network = cluster.network
    sent = sum(network.sent.values())
    streamed = asked.prompt_tokens * config.bytes_per_token if config.cores is None else asked.last_layers
    wanted = streamed + asked.blocks * config.bytes_per_token * config.block_size
    assert "network" in config.without or sent == wanted, f"{sent} bytes were sent, {wanted} were asked for"
    if network.shared:
        close = math.isclose(network.carried, sent, rel_tol=_ROUNDING, abs_tol=_ROUNDED_BYTES)
        assert close, f"the NICs carried {network.carried} bytes of {sent}"
    loaded = sum(hardware.loaded for hardware in cluster.decoding.values())
    wanted = asked.loaded_tokens * config.bytes_per_token
    assert loaded == wanted, f"{loaded} bytes were loaded, {wanted} were asked for"


def _check_tokens(requests: Sequence[Request], outcomes: Sequence[Outcome], cluster: SimulatedCluster) -> None:
    """The first token of each comes of its prefill. One that is not completed may have lost tokens on their way."""
    decoded = sum(hardware.tokens for hardware in cluster.decoding.values())
    produced = sum(max(outcome.output_tokens - 1, 0) for outcome in outcomes)
    lengths = {request.id: request.output_length for request in requests}
    lost = sum(
        max(lengths[outcome.id] - max(outcome.output_tokens, 1), 0)
        for outcome in outcomes
        if outcome.status != COMPLETED
    )
    assert produced <= decoded <= produced + lost, f"{produced} tokens, and {lost} at most, came of steps of {decoded}"


def _check_work(cost: CostModel, outcomes: Sequence[Outcome], cluster: SimulatedCluster) -> None:
    """Of prefills at prefill instances and at decoding instances."""
    prefilled = [outcome for outcome in outcomes if outcome.output_tokens]
    wanted = math.fsum(cost.prefill_compute(o.prompt_tokens, o.reused_tokens) for o in prefilled)
    done = [hardware.group.computed for hardware in cluster.prefill.values()]
    done += [hardware.inlined for hardware in cluster.decoding.values()]
    computed = math.fsum(done)
    assert computed >= wanted - _ROUNDING * abs(wanted), f"{wanted} s of prefills came of {computed}"
    close = math.isclose(computed, wanted, rel_tol=_ROUNDING) or not _all_completed(outcomes)
    assert close, f"{computed} s were computed for prefills of {wanted}"


def _all_completed(outcomes: Sequence[Outcome]) -> bool:
    return all(outcome.status == COMPLETED for outcome in outcomes)
