"""In which order the blocks of an earlier run come back into a pool, so that what leaves first leaves first again."""

from collections.abc import Iterator, Sequence


def order_of_return(stored: Sequence[tuple[bytes, bytes | None]]) -> Iterator[tuple[bytes, int]]:
    """(key, depth in its prompt) of all blocks, given as (key, parent's key), the least recent first.

    A block is as recent as the most recent one that is reached through it, and comes after those: so the head of a
    chain outlives its tail (eviction.py). One whose parent is not there counts as the head of its chain.
    """
    parents, recency = dict(stored), {key: place for place, (key, _) in enumerate(stored)}
    depths = _depths(parents)
    for key in sorted(parents, key=depths.__getitem__, reverse=True):
        parent = parents[key]
        if parent in recency:
            recency[parent] = max(recency[parent], recency[key])
    for key in sorted(parents, key=lambda key: (recency[key], -depths[key])):
        yield key, depths[key]


def _depths(parents: dict[bytes, bytes | None]) -> dict[bytes, int]:
    depths: dict[bytes, int] = {}
    for key in parents:
        chain = []
        while key in parents and key not in depths:
            chain.append(key)
            depths[key] = 0
            key = parents[key]
        depth = depths.get(key, -1)
        for key in reversed(chain):
            depth += 1
            depths[key] = depth
    return depths
