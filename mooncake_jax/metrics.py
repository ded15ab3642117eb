"""TTFT, TBT, SLO attainment and goodput, from requests and the times of their tokens (report 2, FAST25 5.2).

Plain loops and math.fsum only, so that equal times give bit-equal metrics on every Python. Knows nothing of where the
times come from: a real cluster's clock or a simulated one.
"""

import dataclasses
import math
import operator
from collections import Counter
from collections.abc import Iterable, Sequence

from mooncake_jax.request import COMPLETED, FAILED, REJECTED, SLO, Outcome, Request, TokenLogprobs

_FIELDS = tuple(field.name for field in dataclasses.fields(Outcome))
_values = operator.attrgetter(*_FIELDS)
STATUSES = (COMPLETED, REJECTED, FAILED)


def percentile(values: Iterable[float], q: float) -> float | None:
    """The q-th percentile (0 to 100), linear between the two nearest values; None for no values."""
    if not 0 <= q <= 100:
        raise ValueError(f"q is {q}; a percentile is from 0 to 100")
    return _percentile_of(sorted(values), q)


def _percentile_of(ordered: Sequence[float], q: float) -> float | None:
    if not ordered:
        return None
    place = (len(ordered) - 1) * q / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def mean(values: Sequence[float]) -> float | None:
    """The arithmetic mean; None for no values."""
    return math.fsum(values) / len(values) if values else None


class TokenTimes:
    """When the tokens of an output came, in seconds: the first and the last one (None before there is any), and the
    gaps between each and the next.
    """

    __slots__ = ("first", "gaps", "last")

    def __init__(self, times: Sequence[float] = ()):
        self.first = self.last = None
        self.gaps: list[float] = []
        if times:
            self.add(times, gaps_of(times))

    def __len__(self) -> int:
        return 0 if self.first is None else len(self.gaps) + 1

    def add(self, times: Sequence[float], gaps: Sequence[float]) -> None:
        """At least one more, with the gaps between these: many outputs may share them."""
        if self.first is None:
            self.first = times[0]
        else:
            self.gaps.append(times[0] - self.last)
        self.gaps += gaps
        self.last = times[-1]


def gaps_of(times: Sequence[float]) -> list[float]:
    """Between each and the next."""
    return list(map(operator.sub, times[1:], times))


def outcome(
    request: Request,
    status: str,
    *,
    token_times: TokenTimes | Sequence[float] = (),
    reason: str | None = None,
    estimate: float | None = None,
    limit: float | None = None,
    reused_tokens: int | None = None,
    prefill_instance: str | None = None,
    decoding_instance: str | None = None,
    token_ids: Sequence[int] | None = None,
    text: str | None = None,
    logprobs: Sequence[TokenLogprobs] | None = None,
) -> Outcome:
    """How a request ended, with its latencies: token_times are the seconds at which its output tokens came.

    A request that failed midway keeps the latencies of the tokens it got. Raises ValueError where token_ids are given
    and are not one for each time.
    """
    if token_ids is not None and len(token_ids) != len(token_times):
        raise ValueError(f"request {request.id}: {len(token_ids)} token ids with {len(token_times)} token times")
    if not isinstance(token_times, TokenTimes):
        token_times = TokenTimes(token_times)
    gaps = token_times.gaps
    ordered = sorted(gaps)
    longest = ordered[-((len(gaps) + 9) // 10) :] if gaps else []
    return Outcome(
        id=request.id,
        arrival_s=request.arrival,
        priority=request.priority,
        ttft_slo=request.ttft_slo,
        tbt_slo=request.tbt_slo,
        prompt_tokens=request.prompt_tokens,
        reused_tokens=reused_tokens,
        output_tokens=len(token_times),
        status=status,
        reason=reason,
        estimate=estimate,
        limit=limit,
        ttft_s=None if token_times.first is None else token_times.first - request.arrival,
        tbt_mean_s=mean(gaps),
        tbt_p90_s=_percentile_of(ordered, 90),
        tbt_top10_s=mean(longest),
        prefill_instance=prefill_instance,
        decoding_instance=decoding_instance,
        token_ids=None if token_ids is None else tuple(token_ids),
        text=text,
        logprobs=None if logprobs is None else tuple(logprobs),
    )


def attained(outcome: Outcome, slo: SLO) -> bool:
    """True if the request completed with TTFT and TBT (mean of its longest 10 % of gaps) within its own SLO, or within
    this one where it names none.

    A request of a single token has no gaps and meets any TBT.
    """
    ttft = slo.ttft if outcome.ttft_slo is None else outcome.ttft_slo
    tbt = slo.tbt if outcome.tbt_slo is None else outcome.tbt_slo
    if outcome.status != COMPLETED or outcome.ttft_s is None or outcome.ttft_s > ttft:
        return False
    return outcome.tbt_top10_s is None or outcome.tbt_top10_s <= tbt


def summarise(outcomes: Iterable[Outcome], slo: SLO, duration_s: float) -> dict:
    """The run in figures, ready for JSON; None where there is nothing to measure, or an SLO has no limit.

    Tokens, rates, latencies and reuse are those of completed requests. The spreads of ttft_s, tbt_mean_s and
    tbt_top10_s are over requests, each of which counts once with its own figure. slo: of requests that name none.
    Goodput is requests a second that attained their SLO; attainment their share of all requests, the rejected and
    failed included.
    """
    outcomes = list(outcomes)
    done = [outcome for outcome in outcomes if outcome.status == COMPLETED]
    known = [outcome for outcome in done if outcome.reused_tokens is not None]
    prompt = sum(outcome.prompt_tokens for outcome in done)
    output = sum(outcome.output_tokens for outcome in done)
    reused = sum(outcome.reused_tokens for outcome in known)
    met = sum(attained(outcome, slo) for outcome in done)
    return {
        "duration_s": _finite(duration_s),
        "requests": {"total": len(outcomes), **{status: _count(outcomes, status) for status in STATUSES}},
        "reasons": {status: _reasons(outcomes, status) for status in (REJECTED, FAILED)},
        "tokens": {"prompt": prompt, "reused": reused, "output": output},
        "reuse_share": _ratio(reused, sum(outcome.prompt_tokens for outcome in known)),
        "output_tokens_per_s": _ratio(output, duration_s),
        "total_tokens_per_s": _ratio(prompt + output, duration_s),
        "ttft_s": _spread(outcome.ttft_s for outcome in done),
        "tbt_mean_s": _spread(outcome.tbt_mean_s for outcome in done),
        "tbt_top10_s": _spread(outcome.tbt_top10_s for outcome in done),
        "slo": {"ttft_s": _finite(slo.ttft), "tbt_s": _finite(slo.tbt)},
        "attained": met,
        "attainment": _ratio(met, len(outcomes)),
        "goodput_requests_per_s": _ratio(met, duration_s),
    }


def outcome_row(outcome: Outcome) -> dict:
    """The outcome as a row of requests.jsonl, ready for JSON; its keys are Outcome's fields, in their order."""
    row = dict(zip(_FIELDS, _values(outcome)))
    for name in ("ttft_slo", "tbt_slo", "estimate", "limit"):
        row[name] = None if row[name] is None else _finite(row[name])
    row["token_ids"] = None if outcome.token_ids is None else list(outcome.token_ids)
    if outcome.logprobs is not None:
        row["logprobs"] = [{"logprob": token.logprob, "top": token.top} for token in outcome.logprobs]
    return row


def _count(outcomes: list[Outcome], status: str) -> int:
    return len([outcome for outcome in outcomes if outcome.status == status])


def _reasons(outcomes: list[Outcome], status: str) -> dict[str, int]:
    """Reasons with their counts, the most frequent first."""
    return dict(Counter(outcome.reason or "unknown" for outcome in outcomes if outcome.status == status).most_common())


def _spread(values: Iterable[float | None]) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    return {"mean": mean(known)} | {f"p{q}": percentile(known, q) for q in (50, 90, 99)}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
