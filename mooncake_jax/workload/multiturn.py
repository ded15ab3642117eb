"""Seeded multi-turn conversations as token ids, and how much of them an ideal cache would reuse.

Each turn's prompt repeats all before it, as chat clients send it. Knows no tokenizer and no cache: the answers within
the prompts are made up, not the model's.
"""

from collections.abc import Iterable

from mooncake_jax.request import Request
from mooncake_jax.workload.checks import is_integer, is_number, require
from mooncake_jax.workload.prompts import Prompt
from mooncake_jax.workload.tokens import seeded_tokens

SYSTEM, QUESTION, ANSWER = range(3)  # what a run of made-up tokens stands for: part of its seed


def multi_turn(
    *,
    conversations: int,
    turns: int,
    seed: int,
    vocab_size: int,
    system_tokens: int,
    turn_tokens: int,
    answer_tokens: int,
    gap_s: float,
) -> list[Prompt]:
    """conversations * turns prompts, gap_s seconds apart: the first turn of each conversation, then the second of each.

    A prompt is the shared system prompt (system_tokens), for each earlier turn a question (turn_tokens) and a made-up
    answer (answer_tokens), and a new question; it asks for answer_tokens more. Ids are c0t0, c1t0, ... Raises
    UsageError naming the flag.
    """
    counts = {"conversations": conversations, "turns": turns, "vocab_size": vocab_size}
    for flag, value in (counts | {"turn_tokens": turn_tokens, "answer_tokens": answer_tokens}).items():
        require(is_integer(value, 1), flag, value, "an integer of at least 1")
    for flag, value in {"seed": seed, "system_tokens": system_tokens}.items():
        require(is_integer(value, 0), flag, value, "an integer, not negative")
    require(is_number(gap_s), "gap_s", gap_s, "a number of seconds, not negative")
    system = seeded_tokens((seed, SYSTEM), system_tokens, vocab_size)
    histories = [system] * conversations
    prompts = []
    for turn in range(turns):
        for talk, history in enumerate(histories):
            asked = history + seeded_tokens((seed, QUESTION, talk, turn), turn_tokens, vocab_size)
            histories[talk] = asked + seeded_tokens((seed, ANSWER, talk, turn), answer_tokens, vocab_size)
            options = {"prompt_ids": asked, "max_tokens": answer_tokens, "ignore_eos": True}
            prompts.append(Prompt(id=f"c{talk}t{turn}", arrival=len(prompts) * gap_s, **options))
    return prompts


def ideal_reuse(prompts: Iterable[Prompt | Request], block_size: int) -> list[int]:
    """Tokens that each prompt, served one after another, would reuse from one pool without limits.

    The pool holds the full blocks (block_size tokens) of all prompts before, found by their whole prefix; of n tokens
    at most n - 1 are reused, since the last must be computed. Every prompt must have prompt_ids.
    """
    # A tree of prefixes, (parent node, tokens) -> node, root 0: nothing is known below a new node, so hits come first.
    nodes: dict[tuple[int, tuple[int, ...]], int] = {}
    reused = []
    for prompt in prompts:
        ids = prompt.prompt_ids
        node, hits = 0, 0
        for start in range(0, len(ids) - block_size + 1, block_size):
            block = (node, ids[start : start + block_size])
            hits += block in nodes
            node = nodes.setdefault(block, len(nodes) + 1)
        reused.append(min(hits * block_size, max(len(ids) - 1, 0)))
    return reused
