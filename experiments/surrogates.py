"""What figures on the report's own trace share: its file, or surrogates of several seeds, and the spread among those.

A surrogate is made from figures 5 and 6 and the LRU row of table 1, so what it shows of them is fitted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from absl import flags
from clusters import Trace, reports
from figure import seeds_of

from mooncake_jax.metrics import mean


@dataclass(frozen=True)
class Spread:
    """A number of each trace."""

    of_each: Sequence[float]

    @property
    def mean(self) -> float:
        return mean(self.of_each)

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the greatest."""
        return min(self.of_each), max(self.of_each)


def report_traces(values: flags.FlagValues) -> list[Trace]:
    """The one of --trace, else a surrogate for each of --seeds. Raises UsageError."""
    if values.trace is not None:
        return [reports(values)]
    return [reports(values, seed) for seed in seeds_of(values)]


def spread(traces: Sequence[Trace], number: Callable[[Trace], float]) -> Spread:
    return Spread([number(trace) for trace in traces])


def described(values: flags.FlagValues, traces: Sequence[Trace]) -> dict[str, str]:
    """The trace and the kind of a headline that the surrogate was made from, as Headline has them."""
    if values.trace is not None:
        return {"trace": traces[0].label, "kind": "predicted"}
    seeds = len(traces)
    return {"trace": f"{traces[0].label}, {seeds} seed{'s' if seeds > 1 else ''}", "kind": "fitted"}
