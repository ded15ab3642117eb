"""What the experiments beyond the paper share: the cluster of FAST25 in overload, and findings that no paper has."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from figure import Headline, untargeted

from mooncake_jax.metrics import attained, mean
from mooncake_jax.request import SLO, Outcome

PROFILE = "fast25"
LIMITS = SLO(30.0, 0.1)  # seconds: TTFT, TBT (mean of the longest 10 % of gaps)
SLOS = {"ttft_slo": LIMITS.ttft, "tbt_slo": LIMITS.tbt}


def finding(
    name: str, ours: float | int | str | None, trace: str, note: str = "", profile: str = PROFILE, chosen: bool = False
) -> Headline:
    """A number that there is nothing to compare with. chosen: something was, on this very experiment."""
    return Headline(name, None, ours, untargeted(), profile, trace, "fitted" if chosen else "predicted", note)


def good(outcomes: Iterable[Outcome]) -> int:
    """Requests that completed within LIMITS."""
    return sum(attained(outcome, LIMITS) for outcome in outcomes)


def good_by_mean(outcomes: Iterable[Outcome]) -> int:
    """The same, by the mean of all gaps, as the report counts."""
    by_mean = (replace(outcome, tbt_top10_s=outcome.tbt_mean_s) for outcome in outcomes)
    return good(by_mean)


def mean_ttft(outcomes: Sequence[Outcome]) -> float:
    """Of those that got a first token, in seconds."""
    return mean([outcome.ttft_s for outcome in outcomes if outcome.ttft_s is not None])


def reused_share(outcomes: Iterable[Outcome]) -> float:
    """Of the prompt tokens of those that were prefilled."""
    prefilled = [outcome for outcome in outcomes if outcome.reused_tokens is not None]
    return sum(outcome.reused_tokens for outcome in prefilled) / sum(outcome.prompt_tokens for outcome in prefilled)
