"""What `mooncake-jax trace stats` shows: tables, pictures in text, and a picture file where matplotlib is there."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mooncake_jax.cache.hit_rates import HitRate
from mooncake_jax.commands.hit_rates import LEGEND, compute, rates_table
from mooncake_jax.commands.plots import INSTALL, can_plot, picture_formats, pyplot
from mooncake_jax.errors import UsageError
from mooncake_jax.workload.statistics import (
    QUANTILES,
    arrivals,
    block_uses,
    length_counts,
    reuse,
    spread,
    uses_cdf,
)
from mooncake_jax.workload.trace import TraceRow

_WIDTH = 120  # where there is no terminal to ask
_HOTTEST = 10
_TIME_BINS = 20
_MOST_DIGITS = 6  # of times, behind the point
_BAR = 50  # characters of the longest bar

HitRates = dict[tuple[str, float], HitRate]


def print_stats(
    path: str,
    rows: Sequence[TraceRow],
    source: str | None,
    policies: list[str],
    capacities: list[float],
    plot: str | None,
) -> None:
    """rows without hash ids have no reuse to tell of. Raises UsageError where the picture cannot be made."""
    if plot is not None:
        _check_plot(plot)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=_WIDTH, highlight=False)
    console.print(Text(f"{path}: {_counted(rows)}"), soft_wrap=True)
    if source is not None:
        console.print(Text(source, "bold"), soft_wrap=True)
    console.print(_lengths_table(rows))
    for name in ("input_length", "output_length"):
        _print_lengths(console, name, [getattr(row, name) for row in rows])
    uses = block_uses(rows)
    rates: HitRates = {}
    if uses:
        rates = compute(list(rows), policies, capacities)
        _print_reuse(console, rows, uses)
        console.print(rates_table(policies, capacities, rates))
        console.print(LEGEND, style="dim")
    else:
        console.print("no hash ids: what its prompts have in common is not known")
    _print_arrivals(console, rows)
    if plot is not None:
        _draw(plot, rows, uses, rates, source or Path(path).name)
        console.print(Text(f"picture: {plot}"), soft_wrap=True)


def _counted(rows: Sequence[TraceRow]) -> str:
    seconds = max(row.timestamp for row in rows) / 1000
    rate = f", {len(rows) / seconds:.3g} requests/s" if seconds else ""
    told = f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"
    return f"{len(rows):,} requests in {told} s{rate}"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    return table


def _lengths_table(rows: Sequence[TraceRow]) -> Table:
    table = _table("tokens", "mean", *(f"P{q}" for q in QUANTILES), "least", "most")
    for name, lengths in (
        ("input", [row.input_length for row in rows]),
        ("output", [row.output_length for row in rows]),
    ):
        told = spread(lengths)
        shares = (f"{value:,.0f}" for value in told.percentiles)
        table.add_row(name, f"{told.mean:,.1f}", *shares, f"{told.least:,}", f"{told.most:,}")
    return table


def _print_lengths(console: Console, name: str, lengths: Sequence[int]) -> None:
    console.print(Text(f"\n{name} in tokens, share of requests", "bold"))
    counts = length_counts(lengths)
    most = max(count for _, count in counts)
    for upper, count in counts:
        console.print(Text(f"below {upper:>9,}  {count / len(lengths):6.1%} {_bar(count, most)}"))


def _print_reuse(console: Console, rows: Sequence[TraceRow], uses: Counter[int]) -> None:
    told = reuse(rows)
    console.print(Text(f"\nreuse in a pool without limits: {told.block_share:.2%} of blocks", "bold"))
    console.print(
        f"{told.references:,} block references, {told.distinct:,} distinct blocks; {told.token_share:.2%} of prompt "
        "tokens repeat the start of an earlier prompt, in full blocks"
    )
    once = sum(count == 1 for count in uses.values()) / len(uses)
    console.print(f"{once:.1%} of blocks are used once, {_at_most(uses, 5):.1%} at most 5 times")
    table = _table("hottest blocks", *(f"{place}." for place in range(1, _HOTTEST + 1)))
    hottest = uses.most_common(_HOTTEST)
    table.add_row("hash id", *(str(block) for block, _ in hottest))
    table.add_row("uses", *(f"{count:,}" for _, count in hottest))
    table.add_row("share of requests", *(f"{count / len(rows):.1%}" for _, count in hottest))
    console.print(table)
    console.print()


def _at_most(uses: Counter[int], most: int) -> float:
    return sum(count <= most for count in uses.values()) / len(uses)


def _print_arrivals(console: Console, rows: Sequence[TraceRow]) -> None:
    width, counts = arrivals(rows, _TIME_BINS)
    digits = min(max(1 - math.floor(math.log10(width)), 0), _MOST_DIGITS)  # as many as tell the rows apart
    console.print(Text("\narrivals over time, requests/s", "bold"))
    for place, count in enumerate(counts):
        console.print(Text(f"{width * place:>9,.{digits}f} s  {count / width:8.3f} {_bar(count, max(counts))}"))


def _bar(count: int, most: int) -> str:
    return "#" * round(_BAR * count / most)


def _check_plot(plot: str) -> None:
    if not can_plot():
        raise UsageError(f"--plot={plot}: {INSTALL}")
    if not Path(plot).absolute().parent.is_dir():
        raise UsageError(f"--plot={plot}: its folder does not exist; make it or name another file")
    if Path(plot).suffix.lower().lstrip(".") not in (known := picture_formats()):
        raise UsageError(f"--plot={plot}: no picture's name ends so; use one of .{', .'.join(known)}, as stats.png")


def _draw(plot: str, rows: Sequence[TraceRow], uses: Counter[int], rates: HitRates, title: str) -> None:
    """Four panels: lengths, uses of blocks, hit rates, arrivals."""
    pictures = pyplot()
    figure, ((lengths, blocks), (hits, times)) = pictures.subplots(2, 2, figsize=(11, 8), layout="constrained")
    figure.suptitle(title, fontsize=9, wrap=True)
    for name in ("input_length", "output_length"):
        lengths.ecdf([getattr(row, name) for row in rows], label=name)
    lengths.set(xlabel="tokens", ylabel="share of requests", xscale="symlog")
    lengths.legend()
    if uses:
        blocks.step(*zip(*uses_cdf(uses)), where="post")
        for policy in dict.fromkeys(policy for policy, _ in rates):
            points = sorted((size, rate.rate) for (name, size), rate in rates.items() if name == policy)
            hits.plot([min(size, len(uses)) for size, _ in points], [rate for _, rate in points], "o-", label=policy)
        hits.legend()
    blocks.set(xlabel="uses of a block", ylabel="share of blocks", xscale="log")
    hits.set(xlabel="capacity in blocks", ylabel="hit rate", xscale="log")
    width, counts = arrivals(rows, 3 * _TIME_BINS)
    times.stairs([count / width for count in counts], [width * place for place in range(len(counts) + 1)])
    times.set(xlabel="seconds", ylabel="requests/s")
    try:
        figure.savefig(plot, dpi=120)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot={plot}: cannot be written ({error}); name another file, as stats.png") from None
    pictures.close(figure)
