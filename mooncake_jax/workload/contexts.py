"""What prompts have in common, made up for traces that only tell lengths.

Every prompt opens with a part of a *context* that is used by USES prompts, and goes on by itself. OPEN contexts, fewer
in a short trace, are in use at a time, and a prompt takes one of them at random; one that has had its uses makes room
for a new one. The part is the same share of every prompt, up to whole blocks; it is chosen so that the reuse is the one
wanted.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import nextafter

from mooncake_jax.errors import UsageError
from mooncake_jax.workload.checks import is_integer, is_number, require
from mooncake_jax.workload.dice import Dice
from mooncake_jax.workload.trace import TRACE_BLOCK, TraceRow

USES = 20  # prompts of a context
OPEN = 16  # contexts in use at a time
_HALVINGS = 24


def with_contexts(rows: Sequence[TraceRow], reuse: float, seed: int) -> list[TraceRow]:
    """The rows with hash ids: `reuse` is the share of their blocks that a pool without limits would find.

    0 gives every block an id of its own. Raises UsageError for a reuse that these lengths cannot have.
    """
    require(is_number(reuse) and reuse < 1, "reuse", reuse, "a share of blocks, at least 0 and below 1")
    require(is_integer(seed, 0), "seed", seed, "an integer, not negative")
    dice = Dice("contexts", seed)
    places = _contexts(len(rows), dice)
    roundings = [dice.uniform() for _ in rows]

    def shared(share: float) -> list[int]:
        """Blocks of each prompt that are its context's: full ones, since only those can be found again."""
        return [int((row.input_length // TRACE_BLOCK) * share + up) for row, up in zip(rows, roundings)]

    low, high = 0.0, nextafter(1.0, 0.0)
    references = sum(-(-row.input_length // TRACE_BLOCK) for row in rows)
    wanted = reuse * references
    most = _hits(places, shared(high))
    if most < wanted:
        raise UsageError(
            f"a reuse of {reuse:g} cannot be: {len(rows)} prompts of these lengths, {USES} to a context, reuse "
            f"{most / references:.3f} of their blocks at most; ask for less reuse or for more requests"
        )
    for _ in range(_HALVINGS if reuse else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if _hits(places, shared(middle)) >= wanted else (middle, high)
    return _numbered(rows, places, shared(high) if reuse else [0] * len(rows))


def contexts_name(reuse: float, seed: int) -> str:
    """How a trace says by what its reuse was made up."""
    if not reuse:
        return "no reuse: every block has an id of its own"
    return f"made-up reuse of {reuse:g}: contexts of {USES} prompts, {OPEN} at a time, seed {seed}"


def _contexts(count: int, dice: Dice) -> list[int]:
    """The context of each prompt."""
    new = min(OPEN, max(count // (4 * USES), 1))  # or few would have had their uses when the trace ends
    contexts, left = list(range(new)), [USES] * new
    chosen = []
    for _ in range(count):
        place = dice.below(len(contexts))
        chosen.append(contexts[place])
        left[place] -= 1
        if not left[place]:
            contexts[place], left[place], new = new, USES, new + 1
    return chosen


def _hits(contexts: Sequence[int], shared: Sequence[int]) -> int:
    """Blocks that were there before."""
    longest: dict[int, int] = {}
    hits = 0
    for context, blocks in zip(contexts, shared):
        known = longest.get(context, 0)
        hits += min(known, blocks)
        longest[context] = max(known, blocks)
    return hits


def _numbered(rows: Sequence[TraceRow], contexts: Sequence[int], shared: Sequence[int]) -> list[TraceRow]:
    known: dict[int, list[int]] = {}
    new, numbered = 0, []
    for row, context, blocks in zip(rows, contexts, shared):
        ids = known.setdefault(context, [])
        fresh = max(blocks - len(ids), 0)
        ids.extend(range(new, new + fresh))
        own = -(-row.input_length // TRACE_BLOCK) - blocks
        numbered.append(replace(row, hash_ids=(*ids[:blocks], *range(new + fresh, new + fresh + own))))
        new += fresh + own
    return numbered
