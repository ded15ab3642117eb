"""What FAST25 figures 1, 6 and 7 have in common: the share of requests within a TBT limit, on one trace each.

Each is a Figure (capacity_headlines.py). TTFT must be within 30 s; TBT is the mean of the longest 10 % of a request's
gaps.
"""

from collections.abc import Sequence
from statistics import fmean

from absl import flags
from capacity_drawing import draw
from capacity_headlines import HASHED, Figure, Found, Paper, all_headlines, gain, limits_of_paper, paper_share, share_of
from capacity_measures import LIMITS_MS, Measured, measure
from capacity_variations import by_host, varied
from figure import publish
from systems import (
    HASHING,
    MICRO,
    MOONCAKE,
    NAMED,
    PREFIX,
    SLOWEST_HASHING,
    SYSTEMS,
    USUAL_HASHING,
    VLLM,
    label_of,
    serve,
    taken,
    workloads,
)

from mooncake_jax.request import Request
from mooncake_jax.sched.profiles import profile


def make(values: flags.FlagValues, figure: Figure) -> int:
    """Serve, measure, vary and publish; the exit code. Raises UsageError."""
    traces = workloads(values, figure.workload)
    requests = [taken(trace.requests()) for trace in traces]
    found = {(NAMED, system): measured(requests, system, NAMED) for system in (*SYSTEMS, HASHED)}
    found |= {(MICRO, system): measured(requests[:1], system, MICRO) for system in SYSTEMS}
    ours = {system: found[NAMED, system][0] for system in SYSTEMS}
    hosts = by_host(requests[0], {"none": ours[PREFIX], USUAL_HASHING: found[NAMED, HASHED][0]})
    labels = {NAMED: label_of(traces), MICRO: label_of(traces[:1])}
    file = values["out"].default.split("/")[-1]
    theirs = limits_of_paper(figure.series)
    return publish(
        values,
        claim=figure.claim,
        rows=rows_of(found, theirs),
        headlines=all_headlines(figure, found, theirs, labels, hosts[SLOWEST_HASHING]),
        sensitivities=varied(requests[0], ours, figure.varies, hosts),
        lessons=lessons(figure, found, theirs),
        draw=lambda *panels: draw(panels, found, file),
        panels=(1, 2),
        size=(9.6, 4.2),
    )


def measured(requests: Sequence[Sequence[Request]], system: str, calibration: str) -> list[Measured]:
    """Of each trace."""
    if system == HASHED:
        cost = HASHING[USUAL_HASHING].added_to(profile(SYSTEMS[PREFIX].profile))
        return [measure(serve(PREFIX, some, cost=cost)) for some in requests]
    return [measure(serve(system, some, calibration)) for some in requests]


def lessons(figure: Figure, found: Found, theirs: Paper) -> list[str]:
    def ours(system: str) -> str:
        return " / ".join(f"{share_of(found, NAMED, system, limit):.1f}" for limit in LIMITS_MS)

    def papers(system: str) -> str:
        return " / ".join(f"{paper_share(theirs, system, limit):.1f}" for limit in LIMITS_MS)

    gained = [gain(share_of(found, NAMED, MOONCAKE, ms), share_of(found, NAMED, figure.over, ms)) for ms in LIMITS_MS]
    alone, hashed = (off(found, theirs, system) for system in (PREFIX, HASHED))
    verdict = "brings ours nearer" if hashed < alone else "leads further away, so something else decides here"
    return [
        f"Mooncake serves {' / '.join(map(str, gained))} % more requests than {figure.over} within 100 / 200 / 300 ms.",
        f"Prefix caching saves GPU time on every trace (figure 8). In the paper it serves {papers(PREFIX)} % in time, "
        f"and plain vLLM {papers(VLLM)} %; by reuse alone ours serves {ours(PREFIX)} %, and plain vLLM {ours(VLLM)} %; "
        f"with what its host takes to hash and evict blocks of 16 tokens, timed apart from these figures, "
        f"{ours(HASHED)} %.",
        f"Without the host's time ours is {alone:.1f} points off the paper's in the mean, with it {hashed:.1f}: that "
        f"time {verdict}.",
    ]


def off(found: Found, theirs: Paper, system: str) -> float:
    """Points between the paper's shares and ours, in the mean of the limits."""
    return fmean(abs(share_of(found, NAMED, system, ms) - paper_share(theirs, system, ms)) for ms in LIMITS_MS)


def rows_of(found: Found, theirs: Paper) -> list[dict]:
    made = [
        {"source": calibration, "system": system, "trace": place, "tbt_ms": round(limit, 1), "percent": round(share, 3)}
        for (calibration, system), of in found.items()
        for place, one in enumerate(of)
        for limit, share in one.curve()
    ]
    return made + [
        {"source": "paper", "system": system, "tbt_ms": limit, "percent": float(row["y_request_capacity_percent"])}
        for (system, limit), row in theirs.items()
    ]
