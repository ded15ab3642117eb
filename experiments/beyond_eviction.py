"""Beyond the paper: how far eviction policies are from the best that any could do, by capacity.

    python experiments/beyond_eviction.py --traces=DIR       # 40 s of CPU

Table 1 of the report has three policies. Here are all that the pool has, and the offline optimum, on FAST25's traces:
one global pool, requests in order of their timestamps, no time (cache/hit_rates.py). Expected: on conversation LRU is
the best of those that do not know the future from 6,000 blocks on, and below that LengthAware (1,000) or LFU and SIEVE
(3,000), by a point at most; on synthetic LRU is up to 12,000 (at 1,000 FIFO, by 0.1), LFU and SIEVE are at 25,000. The
optimum leaves room above all of them where the pool is small.

LFU and SIEVE hit alike on conversation: at no capacity here does either evict a block that was used since it came in.
There are always others, and of these both evict the oldest.
"""

from beyond import finding
from clusters import Trace, released
from figure import define_flags, parse, publish, run_script
from style import line

from mooncake_jax.cache.hit_rates import OPTIMAL, POLICY_NAMES, hit_rate
from mooncake_jax.workload.trace import TRACE_BLOCK

CLAIM = "No policy that does not know the future comes near the offline optimum where the pool is small."
NAMES = ("conversation", "synthetic")
CAPACITIES = (1_000, 3_000, 6_000, 12_000, 25_000, 50_000, 100_000)  # blocks
SHOWN = 6_000  # blocks: 3 million tokens, a node's DRAM in FAST25

Rates = dict[str, dict[int, float]]  # by policy and capacity

FLAGS = define_flags("beyond_eviction", traces=True)


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    traces = {name: released(FLAGS, name) for name in NAMES}
    ours = {name: rates(trace) for name, trace in traces.items()}
    rows = [
        {"trace": name, "policy": policy, "capacity_blocks": capacity, "hit_rate": rate}
        for name, found in ours.items()
        for policy, by_capacity in found.items()
        for capacity, rate in by_capacity.items()
    ]
    return publish(
        FLAGS,
        claim=CLAIM,
        rows=rows,
        headlines=[
            finding(f"{policy}, {SHOWN:,} blocks, hit rate", found[policy][SHOWN], traces[name].label, profile="none")
            for name, found in ours.items()
            for policy in found
        ],
        lessons=[lesson(name, found) + bests(found) for name, found in ours.items()],
        draw=lambda *panels: draw(panels, ours),
        panels=(1, 2),
        size=(9.0, 3.8),
    )


def rates(trace: Trace) -> Rates:
    requests = [row.hash_ids for row in trace.rows]
    return {
        policy: {capacity: hit_rate(requests, capacity, policy).rate for capacity in CAPACITIES}
        for policy in POLICY_NAMES
    }


def lesson(name: str, found: Rates) -> str:
    online = [policy for policy in found if policy != OPTIMAL]
    best = max(online, key=lambda policy: found[policy][SHOWN])
    least = next((c for c, rate in found[best].items() if rate >= found[OPTIMAL][SHOWN]), None)
    as_much = f"needs {least / SHOWN:.1f} times the memory" if least else "reaches that with no capacity tried"
    return (
        f"{name}: of {SHOWN:,} blocks ({SHOWN * TRACE_BLOCK / 1e6:.1f} M tokens) {best} makes most, "
        f"{found[best][SHOWN]:.1%} hits; knowing the future would make {found[OPTIMAL][SHOWN]:.1%}, for "
        f"which {best} {as_much}."
    )


def bests(found: Rates) -> str:
    """The best that does not know the future, by capacity; and whether LFU and SIEVE differ."""
    online = {policy: rates for policy, rates in found.items() if policy != OPTIMAL}
    told = []
    for capacity in CAPACITIES:
        most = max(rates[capacity] for rates in online.values())
        told.append(f"{capacity:,} {'='.join(policy for policy, rates in online.items() if rates[capacity] == most)}")
    alike = (
        " lfu and sieve hit alike: while there are blocks that were not used since they came in, both evict the oldest."
        if found["lfu"] == found["sieve"]
        else ""
    )
    return f" The best by capacity: {', '.join(told)}.{alike}"


def draw(panels, ours: dict[str, Rates]) -> None:
    for axes, (name, found) in zip(panels, ours.items(), strict=True):
        for place, (policy, by_capacity) in enumerate(found.items()):
            line(axes, list(by_capacity.items()), policy, place)
        axes.set(title=name, xlabel="capacity, blocks", ylabel="hit rate", xscale="log", ylim=(0, None))
        axes.legend()


if __name__ == "__main__":
    run_script(main)
