"""The report's Poisson workloads as questions about documents, each of which is asked about several times.

workload/poisson.py makes reuse up as contexts that prompts of any lengths share; the data sets of the report are long
documents with some questions on each, so that a prompt is either found as a whole or not at all. Of that the lowest
points of figures 11 and 12 tell: with the first, P90 would be that of a prompt found in part.

A document is as long as a prompt of the workload, and its last block, begun or full, is the question's. `at_once`
documents are open at a time, and each request asks about one of them at random.
"""

from collections.abc import Iterator
from dataclasses import replace

from clusters import Trace

from mooncake_jax.workload.dice import Dice
from mooncake_jax.workload.poisson import unshared_rows
from mooncake_jax.workload.trace import TRACE_BLOCK, TraceRow


def asked(name: str, requests: int, rate: float, seed: int, questions: int, at_once: int) -> Trace:
    """So many requests of a workload at `rate` a second, `questions` of them on each document."""
    rows = unshared_rows(name, requests, rate, seed)
    dice = Dice("documents", name, seed)
    chosen = list(_chosen(requests, questions, at_once, dice))
    lengths = [row.input_length for row in unshared_rows(name, max(chosen) + 1, 1.0, seed)]
    return Trace(f"{name}, generated", list(_asking(rows, chosen, lengths)))


def _chosen(requests: int, questions: int, at_once: int, dice: Dice) -> Iterator[int]:
    """The document of each request."""
    documents, left = list(range(at_once)), [questions] * at_once
    unopened = at_once
    for _ in range(requests):
        place = dice.below(at_once)
        yield documents[place]
        left[place] -= 1
        if not left[place]:
            documents[place], left[place] = unopened, questions
            unopened += 1


def _asking(rows: list[TraceRow], chosen: list[int], lengths: list[int]) -> Iterator[TraceRow]:
    blocks: dict[int, tuple[int, ...]] = {}
    fresh = 0  # the next hash id
    for row, document in zip(rows, chosen, strict=True):
        length = lengths[document]
        if document not in blocks:
            shared = (length - 1) // TRACE_BLOCK
            blocks[document] = tuple(range(fresh, fresh + shared))
            fresh += shared
        yield replace(row, input_length=length, hash_ids=(*blocks[document], fresh))
        fresh += 1
