"""How far the shares of capacity.py move with what nobody outside knows of FAST25's runs, one assumption at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from capacity_measures import LIMITS_MS, Measured, measure
from figure import Sensitivity
from systems import (
    CHUNKED,
    HASHING,
    MOONCAKE,
    PREFIX,
    SYSTEMS,
    VLLM,
    request_ms,
    serve,
    with_prefill_factor,
    with_request_ms,
)

from mooncake_jax.request import Request
from mooncake_jax.sched.cost import PolynomialCost
from mooncake_jax.sched.profiles import profile


@dataclass(frozen=True)
class Variation:
    """values: what serve() is to change, by what the assumption is then; nothing where it is as ours."""

    assumption: str
    system: str
    values: Mapping[str, Mapping[str, Any]]


def _steps(system: str, *others: float) -> dict[str, dict[str, PolynomialCost]]:
    """Of the profile's own ms a request, and these."""
    name = SYSTEMS[system].profile
    own = request_ms(name)
    costs = {ms: {"cost": with_request_ms(profile(name), ms)} for ms in others}
    return {f"{ms:g}": changes for ms, changes in sorted((costs | {own: {}}).items())}


def _speeds(system: str) -> dict[str, dict[str, PolynomialCost]]:
    of = profile(SYSTEMS[system].profile)
    return {"1": {}} | {f"{factor:g}": {"cost": with_prefill_factor(of, factor)} for factor in (1.1, 1.25)}


VARIATIONS = (
    Variation("ms a request in Mooncake's step", MOONCAKE, _steps(MOONCAKE, 3.0, 3.5, 4.0)),
    Variation("what Conductor believes of steps", MOONCAKE, {"micro": {}, "fast25": {"believed": "fast25"}}),
    Variation(
        "prefill and decoding nodes",
        MOONCAKE,
        {"7P+9D": {"prefill": 7, "decode": 9}, "8P+8D": {}, "9P+7D": {"prefill": 9, "decode": 7}},
    ),
    Variation("how many times as long Mooncake's prefill computes (MFU)", MOONCAKE, _speeds(MOONCAKE)),
    Variation("how many times as long vLLM's prefill computes (MFU)", VLLM, _speeds(VLLM)),
    Variation("ms a request in vLLM's step", VLLM, _steps(VLLM, 4.5, 5.0)),
    Variation(
        "tokens of an iteration with prefill",
        VLLM,
        {"8,192": {"token_budget": 8192}, "16,384": {}, "131,072": {"token_budget": 131_072}},
    ),
    Variation(
        "who chooses vLLM's node",
        VLLM,
        {"fewest requests": {}, "round robin": {"policy": "round-robin"}, "random": {"policy": "random"}},
    ),
    Variation(
        "tokens of a chunk",
        CHUNKED,
        {"512": {"token_budget": 512}, "1,792": {}, "2,048": {"token_budget": 2048}},
    ),
)

Hosts = Mapping[str, Measured]  # of vLLM with prefix caching, by what its host takes: as HASHING names it


def by_host(requests: Sequence[Request], known: Hosts) -> Hosts:
    """With each of HASHING. known: those that are there, of the same requests."""
    cost = profile(SYSTEMS[PREFIX].profile)
    return {
        name: known.get(name) or measure(serve(PREFIX, requests, cost=host.added_to(cost)))
        for name, host in HASHING.items()
    }


def varied(
    requests: Sequence[Request], ours: Mapping[str, Measured], systems: Sequence[str], hosts: Hosts
) -> list[Sensitivity]:
    """Of these systems, and of hosts in any case. ours: of these requests, by system, with the named profiles."""
    shown = [shares(run.within) for run in hosts.values()]
    made = [Sensitivity("host's time for prefix caching", list(hosts), headline(PREFIX), shown)]
    for one in (one for one in VARIATIONS if one.system in systems):
        runs = {
            name: measure(serve(one.system, requests, **changes)) if changes else ours[one.system]
            for name, changes in one.values.items()
        }
        results = [shares(run.within) for run in runs.values()]
        made.append(Sensitivity(one.assumption, list(runs), headline(one.system), results))
    for system in (MOONCAKE, VLLM):
        by = {"mean of the longest 10 % of gaps": ours[system].within, "mean of all gaps": ours[system].within_by_mean}
        results = [shares(within) for within in by.values()]
        made.append(Sensitivity("TBT of a request", list(by), headline(system), results))
    return made


def headline(system: str) -> str:
    return f"{system} within {' / '.join(map(str, LIMITS_MS))} ms, %"


def shares(within: Any) -> str:
    return " / ".join(f"{within(limit):.1f}" for limit in LIMITS_MS)
