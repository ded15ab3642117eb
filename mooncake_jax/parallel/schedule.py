"""The schedule of chunked pipeline parallelism (paper section 5.1): which chunk each stage computes in which tick.

A chunk enters the pipeline at the first stage and moves on by one stage a tick; whatever enters behind it, of the same
request or the next, follows one tick later. Pure functions of chunks and counts. Knows nothing of JAX, models and
ranks.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

Chunk = TypeVar("Chunk")


def plan_chunks(tokens: int, prefix_len: int, chunk: int) -> list[tuple[int, int]]:
    """(first position, tokens) of each chunk of tokens prefix_len .. tokens - 1."""
    return [(start, min(chunk, tokens - start)) for start in range(prefix_len, tokens, chunk)]


def ticks(entering: Iterable[Chunk | None], stages: int) -> Iterator[tuple[Chunk | None, ...]]:
    """What each stage computes, tick by tick until the last chunk has left; None where it has nothing to do.

    entering: the chunk that enters in each tick, None if there is none. It is asked for the next one only when the
    tick before is given out, so that requests may come while others are underway.
    """
    underway: tuple[Chunk | None, ...] = (None,) * stages
    for chunk in entering:
        underway = (chunk, *underway[:-1])
        yield underway
    while any(chunk is not None for chunk in underway[:-1]):
        underway = (None, *underway[:-1])
        yield underway


def bubbles(plan: Iterable[tuple[Chunk | None, ...]]) -> tuple[int, int]:
    """(places without work, all places) of these ticks, a place being one stage in one tick."""
    plan = list(plan)
    return sum(chunk is None for tick in plan for chunk in tick), sum(map(len, plan))


def makespan(seconds: Sequence[Sequence[float]]) -> float:
    """When the last chunk leaves a perfect pipeline, in which passing on takes no time and no stage waits for another
    but for its input: seconds[i][s] is what chunk i takes on stage s.
    """
    free = [0.0] * (len(seconds[0]) if seconds else 0)  # when each stage has done its last chunk
    for chunk in seconds:
        ready = 0.0
        for stage, cost in enumerate(chunk):
            ready = free[stage] = max(ready, free[stage]) + cost
    return free[-1] if free else 0.0
