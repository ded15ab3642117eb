"""Writes a seeded multi-turn workload as a prompts file, for `mooncake-jax replay --prompts=FILE`.

    python scripts/multiturn.py --out=multiturn.jsonl

Prints how much of it one cache without limits would reuse: the mean share that a replay can reach, and should.
"""

import math
import sys

from absl import app, flags

from mooncake_jax.errors import UsageError
from mooncake_jax.workload.checks import require
from mooncake_jax.workload.multiturn import ideal_reuse, multi_turn
from mooncake_jax.workload.prompts import write_prompts

OUT = flags.DEFINE_string("out", None, "The prompts file (JSONL) to write.", required=True)
CONVERSATIONS = flags.DEFINE_integer("conversations", 8, "Conversations.")
TURNS = flags.DEFINE_integer("turns", 5, "Turns of each conversation.")
SEED = flags.DEFINE_integer("seed", 0, "Seed of the made-up tokens.")
VOCAB_SIZE = flags.DEFINE_integer("vocab_size", 49152, "Token ids are below this; the default is SmolLM2's.")
SYSTEM_TOKENS = flags.DEFINE_integer("system_tokens", 70, "Tokens of the system prompt that all share.")
TURN_TOKENS = flags.DEFINE_integer("turn_tokens", 30, "Tokens of each question.")
ANSWER_TOKENS = flags.DEFINE_integer("answer_tokens", 20, "Tokens of each answer.")
GAP_S = flags.DEFINE_float("gap_s", 1.0, "Seconds between arrivals.")
BLOCK_SIZE = flags.DEFINE_integer("block_size", 16, "Tokens of a cache block, for the reuse that is printed.")


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    try:
        require(BLOCK_SIZE.value >= 1, "block_size", BLOCK_SIZE.value, "an integer of at least 1")
        prompts = multi_turn(
            conversations=CONVERSATIONS.value,
            turns=TURNS.value,
            seed=SEED.value,
            vocab_size=VOCAB_SIZE.value,
            system_tokens=SYSTEM_TOKENS.value,
            turn_tokens=TURN_TOKENS.value,
            answer_tokens=ANSWER_TOKENS.value,
            gap_s=GAP_S.value,
        )
        write_prompts(OUT.value, prompts)
    except UsageError as error:
        print(f"multiturn.py: {error}", file=sys.stderr)
        return 2
    lengths = [len(prompt.prompt_ids) for prompt in prompts]
    reused = ideal_reuse(prompts, BLOCK_SIZE.value)
    shares = math.fsum(hit / length for hit, length in zip(reused, lengths)) / len(prompts)
    print(f"{OUT.value}: {len(prompts)} prompts, {sum(lengths)} tokens, the longest {max(lengths)}")
    print(
        f"ideal reuse with blocks of {BLOCK_SIZE.value}: {sum(reused)} tokens, {sum(reused) / sum(lengths):.1%}"
        f" of all; mean over prompts {shares:.1%}"
    )
    return 0


if __name__ == "__main__":
    app.run(main)
