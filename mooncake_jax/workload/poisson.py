"""The report's public and simulated workloads (section 8.1, figures 11 and 12): Poisson arrivals, lengths and reuse.

The report gives the means of ArXiv Summarization and L-Eval, not how lengths spread: here each is the sum of four
exponential numbers (a standard deviation of half the mean), scaled so that the mean is the report's. Simulated prompts
all have one length. What prompts have in common is made up as contexts.py says.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from mooncake_jax.workload.checks import is_integer, is_number, require, require_requests
from mooncake_jax.workload.contexts import contexts_name, with_contexts
from mooncake_jax.workload.dice import Dice
from mooncake_jax.workload.trace import TraceRow

_STAGES = 4  # of the sum that a length is


@dataclass(frozen=True)
class Workload:
    """Mean lengths in tokens; reuse: the share of blocks that a pool without limits would find."""

    input_length: int
    output_length: int
    reuse: float
    spread: bool  # lengths differ


WORKLOADS = {
    "arxiv-summarization": Workload(8_088, 229, 0.0, True),
    "l-eval": Workload(19_019, 72, 0.82, True),  # "above 80 %"
    **{f"simulated-{k}k": Workload(k * 1024, 512, 0.5, False) for k in (16, 32, 64, 128)},
}


def poisson_rows(name: str, requests: int, rate: float, seed: int) -> list[TraceRow]:
    """So many requests of a workload, arriving `rate` a second on average. Raises UsageError naming the flag."""
    return with_contexts(unshared_rows(name, requests, rate, seed), WORKLOADS[name].reuse, seed)


def unshared_rows(name: str, requests: int, rate: float, seed: int) -> list[TraceRow]:
    """The same without hash ids: what prompts have in common is left to others. Raises UsageError."""
    require_requests(requests)
    require(is_number(rate) and rate >= 1e-6, "rate", rate, "a number of requests a second, at least 0.000001")
    require(is_integer(seed, 0), "seed", seed, "an integer, not negative")
    workload = WORKLOADS[name]
    dice = Dice("poisson", name, seed)
    arrivals = accumulate(dice.exponential() for _ in range(requests))
    inputs = _lengths(workload.input_length, requests, workload.spread, dice)
    outputs = _lengths(workload.output_length, requests, workload.spread, dice)
    milliseconds = (int(arrival * 1000 / rate) for arrival in arrivals)
    return [TraceRow(*fields, (), index) for index, fields in enumerate(zip(milliseconds, inputs, outputs))]


def workload_name(name: str, rate: float, seed: int) -> str:
    """How a trace says what it is."""
    workload = WORKLOADS[name]
    return f"{name}: Poisson at {rate:g} requests/s, seed {seed}; {contexts_name(workload.reuse, seed)}"


def _lengths(mean: int, count: int, spread: bool, dice: Dice) -> Iterable[int]:
    """Integers of at least 1 whose mean is `mean` up to rounding."""
    if not spread:
        return [mean] * count
    drawn = [_stages(dice) for _ in range(count)]
    total = 0.0
    for number in drawn:
        total += number
    return [max(round(number * (mean * count / total)), 1) for number in drawn]


def _stages(dice: Dice) -> float:
    total = 0.0
    for _ in range(_STAGES):
        total += dice.exponential()
    return total
