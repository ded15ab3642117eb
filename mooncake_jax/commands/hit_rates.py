"""mooncake-jax hit-rates: block hits / block references of a trace, by policy and capacity (report 4.2, table 1).

One pool, requests in the order of their timestamps, no time: see cache/hit_rates.py for what exactly is counted.
"""

import json
import math
from itertools import product
from pathlib import Path

from absl import flags
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mooncake_jax.cache.hit_rates import OPTIMAL, POLICY_NAMES, HitRate, hit_rate
from mooncake_jax.commands.progress import WorkProgress
from mooncake_jax.commands.reading import read_rows
from mooncake_jax.errors import UsageError
from mooncake_jax.workload.trace import TraceRow

FLAGS = flags.FlagValues()
TABLE_1 = ["1000", "10000", "30000", "50000", "100000", "inf"]
_WIDTH = 120  # where there is no terminal to ask
LEGEND = (
    "All blocks of a request are looked up before any is inserted, and each counts by itself. lfu and length forget "
    f"what was evicted. {OPTIMAL} knows the future: no policy can do better."
)

HitRates = dict[tuple[str, float], HitRate]  # by policy and capacity


def _define() -> None:
    kwargs = {"flag_values": FLAGS}
    flags.DEFINE_string("trace", None, "a trace in Mooncake's format (JSONL with hash_ids)", **kwargs)
    flags.DEFINE_list("capacities", TABLE_1, "sizes of the pool in blocks; inf: without limit", **kwargs)
    flags.DEFINE_list("policies", list(POLICY_NAMES), "some of the default; see cache/eviction.py", **kwargs)
    flags.DEFINE_string("json", None, "file to write the same figures to", **kwargs)


_define()


def main(arguments: list[str]) -> int:
    unknown = FLAGS(["hit-rates", *arguments])[1:]
    if unknown:
        raise UsageError(f"{unknown[0]!r} is no flag: flags are written --name=value")
    if not FLAGS.trace:
        raise UsageError("--trace is missing; give --trace=FILE")
    capacities, policies = parse_capacities(FLAGS.capacities), parse_policies(FLAGS.policies)
    if FLAGS.json is not None and not Path(FLAGS.json).absolute().parent.is_dir():
        raise UsageError(f"--json={FLAGS.json}: its folder does not exist; make it or name another file")
    rows, _ = read_rows(FLAGS.trace, "hit-rates")
    results = compute(rows, policies, capacities)
    _print(rows, policies, capacities, results)
    if FLAGS.json is not None:
        _write(FLAGS.json, results)
    return 0


def parse_capacities(values: list[str]) -> list[float]:
    """Of --capacities. Raises UsageError."""
    capacities = []
    for value in values:
        if value != "inf" and not (value.isascii() and value.isdigit()):
            raise UsageError(f"--capacities: {value!r} is no number of blocks; give integers or inf, as in 1000,inf")
        capacities.append(math.inf if value == "inf" else int(value))
    return _some("capacities", capacities)


def parse_policies(values: list[str]) -> list[str]:
    """Of --policies. Raises UsageError."""
    for value in values:
        if value not in POLICY_NAMES:
            raise UsageError(f"--policies: there is no policy {value!r}; use some of {','.join(POLICY_NAMES)}")
    return _some("policies", values)


def _some(flag: str, values: list) -> list:
    """Each once."""
    if not values:
        raise UsageError(f"--{flag}= is empty; name at least one, or leave the flag out")
    return list(dict.fromkeys(values))


def compute(rows: list[TraceRow], policies: list[str], capacities: list[float]) -> HitRates:
    """Tells its progress on stderr."""
    requests = [row.hash_ids for row in rows]
    settings = list(product(policies, capacities))
    results: HitRates = {}
    with WorkProgress("computing", "computed") as progress:
        for policy, capacity in settings:
            results[policy, capacity] = hit_rate(requests, capacity, policy)
            progress.update(len(results), len(settings))
    return results


def _print(rows: list[TraceRow], policies: list[str], capacities: list[float], results: HitRates) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    references = sum(len(row.hash_ids) for row in rows)
    distinct = len({hash_id for row in rows for hash_id in row.hash_ids})
    counts = f"{len(rows):,} requests, {references:,} block references, {distinct:,} distinct blocks"
    console.print(Text(f"{FLAGS.trace}: {counts}"), soft_wrap=True)
    console.print(rates_table(policies, capacities, results))
    console.print(LEGEND, style="dim")


def rates_table(policies: list[str], capacities: list[float], results: HitRates) -> Table:
    """A row a policy, a column a capacity."""
    table = Table("hit rate at blocks", box=None, pad_edge=False, header_style="bold")
    for capacity in capacities:
        table.add_column(_blocks(capacity), justify="right")
    for policy in policies:
        table.add_row(policy, *(f"{results[policy, capacity].rate:.2%}" for capacity in capacities))
    return table


def _blocks(capacity: float) -> str:
    return "inf" if capacity == math.inf else f"{capacity:,}"


def _write(path: str, results: HitRates) -> None:
    """A JSON list of one object for each setting; capacity is null where there is no limit."""
    rows = [
        {
            "trace": FLAGS.trace,
            "policy": policy,
            "capacity": None if capacity == math.inf else capacity,
            "hits": result.hits,
            "references": result.references,
            "hit_rate": result.rate,
        }
        for (policy, capacity), result in results.items()
    ]
    try:
        Path(path).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--json={path}: cannot be written ({error.strerror or error}); name another file") from None
