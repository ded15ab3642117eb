"""What the SSDs of an instance's stages hold as a run begins, put together: a block is there if every stage has its
part of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mooncake_jax.cache.restoring import order_of_return
from mooncake_jax.cluster.control import Ready


@dataclass(frozen=True, slots=True)
class SSDContents:
    """blocks: that every stage has room for; stored: (key, parent's key) of the whole blocks, the least recent first;
    useless: by rank, keys of what the pool will not know.
    """

    blocks: int
    stored: tuple[tuple[bytes, bytes | None], ...]
    useless: dict[str, tuple[bytes, ...]]


def put_together(stages: Mapping[str, Ready]) -> SSDContents:
    """stages: what the ranks of one instance have reported, the first stage first."""
    blocks = min(ready.ssd_blocks for ready in stages.values())
    first, *others = (dict(ready.ssd_stored) for ready in stages.values())
    whole = {key: parent for key, parent in first.items() if all(key in other for other in others)}
    ordered = [key for key, _ in order_of_return(tuple(whole.items()))]
    kept = ordered[max(len(ordered) - blocks, 0) :]
    known = set(kept)
    useless = {node: tuple(key for key, _ in ready.ssd_stored if key not in known) for node, ready in stages.items()}
    return SSDContents(blocks, tuple((key, whole[key]) for key in kept), useless)
