"""What can be told of a trace by counting: lengths, reuse in a pool without limits, uses of blocks, arrivals over time.

Hit rates of pools with a limit are cache/hit_rates.py's.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_jax.metrics import percentile
from mooncake_jax.workload.trace import TRACE_BLOCK, TraceRow

QUANTILES = (50, 90, 99)


@dataclass(frozen=True)
class Spread:
    """Of lengths in tokens; percentiles by QUANTILES."""

    mean: float
    percentiles: tuple[float, ...]
    least: int
    most: int


@dataclass(frozen=True)
class Reuse:
    """Block references, distinct blocks among them, and the tokens of prompts that repeat the start of an earlier one:
    of full blocks, and never a prompt's last token.
    """

    references: int
    distinct: int
    tokens: int
    reused_tokens: int

    @property
    def block_share(self) -> float:
        """0 to 1."""
        return 1 - self.distinct / self.references if self.references else 0.0

    @property
    def token_share(self) -> float:
        """0 to 1."""
        return self.reused_tokens / self.tokens if self.tokens else 0.0


def spread(lengths: Sequence[int]) -> Spread:
    """lengths: at least one."""
    shares = tuple(percentile(lengths, q) or 0.0 for q in QUANTILES)
    return Spread(sum(lengths) / len(lengths), shares, min(lengths), max(lengths))


def reuse(rows: Sequence[TraceRow]) -> Reuse:
    """In the order given, one pool that forgets nothing."""
    known: set[int] = set()
    reused = references = 0
    for row in rows:
        full = row.hash_ids[: row.input_length // TRACE_BLOCK]
        hits = next((place for place, block in enumerate(full) if block not in known), len(full))
        reused += min(hits * TRACE_BLOCK, max(row.input_length - 1, 0))
        references += len(row.hash_ids)
        known.update(row.hash_ids)
    return Reuse(references, len(known), sum(row.input_length for row in rows), reused)


def block_uses(rows: Sequence[TraceRow]) -> Counter[int]:
    """How many times each hash id occurs."""
    uses: Counter[int] = Counter()
    for row in rows:
        uses.update(row.hash_ids)
    return uses


def uses_cdf(uses: Counter[int]) -> list[tuple[int, float]]:
    """(count, share of blocks with at most so many uses), ascending: figure 6 of the report."""
    blocks_by_count = sorted(Counter(uses.values()).items())
    below, points = 0, []
    for count, blocks in blocks_by_count:
        below += blocks
        points.append((count, below / len(uses)))
    return points


def arrivals(rows: Sequence[TraceRow], bins: int) -> tuple[float, list[int]]:
    """(seconds of a bin, requests in each) over the time from 0 to the last arrival; rows: at least one."""
    width = max(row.timestamp for row in rows) / bins or 1.0
    counts = [0] * bins
    for row in rows:
        counts[min(math.floor(row.timestamp / width), bins - 1)] += 1
    return width / 1000, counts


def length_counts(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(bound, how many lengths are below it and not below half of it): bounds are powers of two, ascending."""
    by_bound = Counter(1 << length.bit_length() for length in lengths)
    lowest, highest = min(by_bound), max(by_bound)
    bounds = [lowest << place for place in range((highest // lowest).bit_length())]
    return [(bound, by_bound[bound]) for bound in bounds]
