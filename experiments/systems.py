"""What FAST25 compares end to end (5.2, figures 1, 6, 7, 8): Mooncake and three kinds of vLLM, 16 nodes each, as data.

Named profiles: `fast25` and, of vLLM, `vllm051`; beside them all of it with `micro`, whose costs come from outside
these figures. Conductor believes `micro` in either case: the report's predicts by what was measured offline (6.1).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from absl import flags
from clusters import QUICK_REQUESTS, Trace, released, run
from figure import seeds_of

from mooncake_jax.request import Request
from mooncake_jax.sched.cost import PolynomialCost
from mooncake_jax.sched.profiles import profile
from mooncake_jax.simulate.run import Run
from mooncake_jax.workload.released import RELEASED
from mooncake_jax.workload.surrogate import RATE, REQUESTS, SHAPES, surrogate_rows

MOONCAKE, VLLM = "Mooncake", "vLLM"  # as the paper's CSVs have them
PREFIX, CHUNKED = "vLLM Prefix Caching", "vLLM Chunked Prefill"
NAMED, MICRO = "named", "micro"  # calibrations
CALIBRATIONS = (NAMED, MICRO)
# Tokens: LLaMA3-70B takes no longer prompt, nor does that vLLM. They are left out for all, as what figure 8 shows for
# the synthetic trace says: with them each bar would be 5 % higher.
LONGEST_PROMPT = 131_072
_SURROGATE = "surrogate of tool&agent, seed "  # and which


@dataclass(frozen=True)
class System:
    """profile: its named one; settings: of SimulationConfig, and what Conductor believes."""

    profile: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def profile_in(self, calibration: str) -> str:
        return MICRO if calibration == MICRO else self.profile


SYSTEMS = {
    MOONCAKE: System("fast25", {"prefill": 8, "decode": 8, "believed": "micro"}),
    VLLM: System("vllm051", {"coupled": 16, "coupled_mode": "plain"}),
    PREFIX: System("vllm051", {"coupled": 16, "coupled_mode": "prefix_cache"}),
    CHUNKED: System("vllm051-chunked", {"coupled": 16, "coupled_mode": "chunked_prefill", "token_budget": 1792}),
}


def serve(system: str, requests: Sequence[Request], calibration: str = NAMED, **changes: Any) -> Run:
    """Nobody is rejected. changes: `cost`, and whatever else the system's settings are to be instead."""
    of = SYSTEMS[system]
    settings = {"cost": of.profile_in(calibration), "admission": "none"} | dict(of.settings)
    return run(requests, **settings | changes)


def workloads(values: flags.FlagValues, name: str) -> list[Trace]:
    """The released trace of this name; for a tool&agent trace that is not there, a surrogate of each seed. Raises
    UsageError.
    """
    if name != "toolagent" or (Path(values.traces) / RELEASED[name].file_name).is_file():
        return [released(values, name)]
    limit = QUICK_REQUESTS if values.quick else None
    shape = SHAPES["surrogate-toolagent"]
    return [
        Trace(f"{_SURROGATE}{seed}", tuple(surrogate_rows(shape, REQUESTS, RATE, seed)[:limit]))
        for seed in seeds_of(values)
    ]


def label_of(traces: Sequence[Trace]) -> str:
    """Of those that a number is the mean of: workloads() gave them, or some of them."""
    first, *others = (trace.label for trace in traces)
    if not others:
        return first
    seeds = (label.removeprefix(_SURROGATE) for label in (first, *others))
    return f"{_SURROGATE.replace('seed', 'seeds')}{', '.join(seeds)}"


def taken(requests: Sequence[Request]) -> list[Request]:
    """Those that the model takes."""
    return [request for request in requests if request.prompt_tokens <= LONGEST_PROMPT]


def request_ms(name: str) -> float:
    """What one more request in the batch adds to a step, in the profile of this name."""
    return round(1000 * profile(name).step_coefficients[1], 3)


def with_prefill_factor(cost: PolynomialCost, factor: float) -> PolynomialCost:
    """Prefills compute so many times as long: MFU is divided by it."""
    return replace(cost, prefill_coefficients=tuple(factor * each for each in cost.prefill_coefficients))


def with_request_ms(cost: PolynomialCost, ms: float) -> PolynomialCost:
    """A request more in the batch adds so much to a step, and one alone takes what it took."""
    constant, request, token = cost.step_coefficients
    seconds = ms / 1000
    return replace(cost, step_coefficients=(constant + request - seconds, seconds, token))


@dataclass(frozen=True)
class BlockHashing:
    """Time of the host that vLLM's prefix caching of 2024 takes, while its devices wait: for each prompt seconds times
    its length squared, for each step seconds times the context of the batch.
    """

    prompt_s: float
    step_s: float

    def added_to(self, cost: PolynomialCost) -> PolynomialCost:
        """Of a prompt that reuses p of n tokens, n² - p² counts: what is reused is hashed for nothing here."""
        constant, linear, quadratic = cost.prefill_coefficients
        step, request, token = cost.step_coefficients
        return replace(
            cost,
            prefill_coefficients=(constant, linear, quadratic + 2 * self.prompt_s),
            step_coefficients=(step, request, token + self.step_s),
        )


# Loops of that form, as host_hashing.py times them on one core of a server (an AMD EPYC, CPython 3.12); none was chosen
# by a figure. Each block of 16 tokens is known by a hash of all tokens up to it (vllm-project/vllm issue #4620, pull
# request #8935): 0.10 ns a token squared where they are sliced from a tuple, 0.20 where a list is copied first. Once
# the cache is full, each new block makes it look through all that the prompt to be evicted has left: 0.15. Each step
# walks over all blocks of the batch, 3.2 ns a token. Nobody outside knows how slow the paper's hosts were.
HASHING = {
    "none": BlockHashing(0.0, 0.0),
    "hashing by slices": BlockHashing(0.10e-9, 3.2e-9),
    "that and evicting": BlockHashing(0.25e-9, 3.2e-9),
    "hashing by copies, evicting": BlockHashing(0.35e-9, 3.2e-9),
    "that, on a host 3 times as slow": BlockHashing(1.05e-9, 9.6e-9),
}
USUAL_HASHING, SLOWEST_HASHING = "that and evicting", "that, on a host 3 times as slow"
