"""Hit rates of a workload over one pool of blocks: block hits / block references (report 4.2, table 1).

Requests come one after another, in the order given; there is no time. All blocks of a request are looked up before any
is inserted, and each counts by itself, found or not, whether its parent is there or not. Then the request's blocks are
used or inserted, from the last to the first; while it is served they are pinned, as in the KVCachePool. Of a request
with more blocks than the pool has room for, the leading ones are.

A block that a request names twice is two references, and one block. Knows nothing of tokens, instances or bytes.
"""

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mooncake_jax.cache.entry import Entry
from mooncake_jax.cache.eviction import POLICIES, EvictionPolicy, Optimal

OPTIMAL = "optimal"
POLICY_NAMES = (*POLICIES, OPTIMAL)

Request = Sequence[Hashable]  # its blocks, as hash ids or keys, from the first


@dataclass(frozen=True, slots=True)
class HitRate:
    """Block references of a workload, and how many of them were hits."""

    hits: int
    references: int

    @property
    def rate(self) -> float:
        """0 to 1; 0 for a workload without references."""
        return self.hits / self.references if self.references else 0.0


def hit_rate(requests: Iterable[Request], capacity: float, policy: str) -> HitRate:
    """capacity: blocks, at least 0, or math.inf; policy: one of POLICY_NAMES."""
    if policy == OPTIMAL:
        return optimal_hit_rate(requests, capacity)
    return policy_hit_rate(requests, capacity, POLICIES[policy]())


def policy_hit_rate(requests: Iterable[Request], capacity: float, policy: EvictionPolicy) -> HitRate:
    """The hit rate under any policy, which must hold no block yet. capacity: blocks, at least 0, or math.inf."""
    hits = references = 0
    for request, found in hits_by_request(requests, capacity, policy):
        hits += found
        references += len(request)
    return HitRate(hits, references)


def hits_by_request(
    requests: Iterable[Request], capacity: float, policy: EvictionPolicy
) -> Iterator[tuple[Request, int]]:
    """Each request with how many of its blocks were hit; as policy_hit_rate() in all else."""
    resident: dict[Hashable, Entry] = {}
    for request in requests:
        yield request, _hits(request, resident)
        blocks = _leading(request, capacity)
        _touch(policy, blocks, resident)
        if len(resident) > capacity:
            entries = [resident[key] for key in blocks]
            for entry in entries:
                entry.pins = 1
            _shrink(policy, resident, capacity)
            for entry in entries:
                entry.pins = 0
            policy.unpinned(entries)


def optimal_hit_rate(requests: Iterable[Request], capacity: float) -> HitRate:
    """The most that any choice of blocks to keep could have hit: Belady's, which need not keep a request's blocks even
    while it is served. Exact where no request names a block twice, which chained ids never do. capacity: blocks, at
    least 0, or math.inf.
    """
    requests = [tuple(request) for request in requests]
    next_use: dict[Hashable, float] = {}
    policy, resident = Optimal(next_use), {}
    hits = 0
    for request, following in zip(requests, _next_uses(requests)):
        hits += _hits(request, resident)
        next_use.update(zip(request, following))
        _touch(policy, _leading(request, math.inf), resident)
        _shrink(policy, resident, capacity)
    return HitRate(hits, sum(map(len, requests)))


def _hits(request: Request, resident: Mapping[Hashable, Entry]) -> int:
    return sum([key in resident for key in request])


def _leading(request: Request, capacity: float) -> list[Hashable]:
    """The blocks of a request, each once, as many leading ones as a pool has room for."""
    blocks = list(dict.fromkeys(request))
    return blocks if len(blocks) <= capacity else blocks[: int(capacity)]


def _touch(policy: EvictionPolicy, blocks: Sequence[Hashable], resident: dict[Hashable, Entry]) -> None:
    for depth in range(len(blocks) - 1, -1, -1):  # the head last, so that it outlives its tail
        key = blocks[depth]
        if key in resident:
            policy.use(resident[key])
        else:
            resident[key] = entry = Entry(key)
            policy.insert(entry, depth)


def _shrink(policy: EvictionPolicy, resident: dict[Hashable, Entry], capacity: float) -> None:
    while len(resident) > capacity:
        del resident[policy.evict().key]


def _next_uses(requests: Sequence[Request]) -> list[list[float]]:
    """For each block of each request, the index of the next request that names it; math.inf if none does."""
    upcoming: dict[Hashable, float] = {}
    following: list[list[float]] = []
    for index in range(len(requests) - 1, -1, -1):
        following.append([upcoming.get(key, math.inf) for key in requests[index]])
        upcoming.update(dict.fromkeys(requests[index], index))
    return following[::-1]
