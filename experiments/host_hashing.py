"""What vLLM's prefix caching of 2024 took of its host, timed again on this machine: the constants of systems.HASHING.

    python experiments/host_hashing.py [--tokens=4096,16384] [--repeats=3]        # a second

Loops of that form, alone in CPython, without vLLM: what each takes is told in nanoseconds, of a token squared (hashing,
evicting) or of a token (stepping), the least of all repeats. It is time of the processor, not of a clock on the wall,
which on a machine that others use as well says several times as much. systems.HASHING has 0.10 (slices), 0.20
(copies), 0.15 (evicting) and 3.2 a token; machines and versions of Python differ.
"""

import time
from collections.abc import Callable
from types import SimpleNamespace

from absl import flags
from script import parse, run_script

from mooncake_jax.errors import UsageError

BLOCK = 16  # tokens

FLAGS = flags.FlagValues()
flags.DEFINE_list("tokens", ["4096", "16384"], "lengths of the prompt, at least 16 each", flag_values=FLAGS)
flags.DEFINE_integer("repeats", 3, "turns, of which the fastest counts", lower_bound=1, flag_values=FLAGS)


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    for tokens in lengths():
        told = ", ".join(f"{name} {took(loop, tokens):.3g} {unit}" for name, (loop, unit) in LOOPS.items())
        print(f"{tokens:,} tokens: {told}")
    return 0


def lengths() -> list[int]:
    """Those of --tokens. Raises UsageError."""
    if not FLAGS.tokens or not all(text.isdecimal() and int(text) >= BLOCK for text in FLAGS.tokens):
        raise UsageError(f"--tokens={','.join(FLAGS.tokens)}: name integers from {BLOCK} on, with commas between")
    return [int(text) for text in FLAGS.tokens]


def took(loop: Callable[[int], float], tokens: int) -> float:
    """Nanoseconds of the unit that the loop counts."""
    return 1e9 * min(loop(tokens) for _ in range(FLAGS.repeats))


def hash_slices(tokens: int) -> float:
    """Each block is known by a hash of all tokens up to it, sliced from a tuple; seconds of a token squared."""
    prompt = tuple(range(1000, 1000 + tokens))
    started = time.process_time()
    for end in range(BLOCK, tokens + 1, BLOCK):
        hash((prompt[:end], 0))
    return (time.process_time() - started) / tokens**2


def hash_copies(tokens: int) -> float:
    """The same where the prompt and what was generated are joined to a list first, each time."""
    prompt, generated = list(range(1000, 1000 + tokens)), []
    started = time.process_time()
    for end in range(BLOCK, tokens + 1, BLOCK):
        hash((tuple((prompt + generated)[:end]), 0))
    return (time.process_time() - started) / tokens**2


def evict(tokens: int) -> float:
    """Each new block looks through all that an evicted prompt, as long, has left, for the one farthest from its
    beginning; seconds of a token squared.
    """
    blocks = tokens // BLOCK
    left = {place: SimpleNamespace(last_accessed=1.0, num_hashed_tokens=BLOCK * (place + 1)) for place in range(blocks)}
    started = time.process_time()
    while left:
        found_place, found = next(iter(left.items()))
        for place, block in left.items():
            if found.last_accessed < block.last_accessed:
                break
            if found.num_hashed_tokens < block.num_hashed_tokens:
                found_place, found = place, block
        del left[found_place]
    return (time.process_time() - started) / tokens**2


def step(tokens: int) -> float:
    """Each step marks every block of the batch as used; seconds of a token of context."""
    blocks, steps = [SimpleNamespace(last_accessed=0.0) for _ in range(tokens // BLOCK)], 100
    started = time.process_time()
    for _ in range(steps):
        now = time.time()
        for block in blocks:
            block.last_accessed = now
            block.computed = True
    return (time.process_time() - started) / (steps * tokens)


LOOPS = {
    "hashing by slices": (hash_slices, "ns a token squared"),
    "hashing by copies": (hash_copies, "ns a token squared"),
    "evicting": (evict, "ns a token squared"),
    "stepping": (step, "ns a token"),
}


if __name__ == "__main__":
    run_script(main)
