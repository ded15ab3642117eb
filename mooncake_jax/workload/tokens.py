"""Made-up token ids from a seed, for workloads that carry no text.

The same seed gives the same tokens on every machine and every numpy: only the raw stream of PCG64 is used, which numpy
keeps stable, and not its distributions, which it does not. Knows no tokenizer: an id may be a special token.
"""

from collections.abc import Sequence

import numpy as np


def seeded_tokens(entropy: Sequence[int], count: int, vocab_size: int) -> tuple[int, ...]:
    """`count` token ids in [0, vocab_size), uniform; entropy: non-negative ints. Fewer tokens are a prefix of more."""
    raw = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(count)
    # The upper half of each 64-bit draw, scaled from [0, 2**32) to [0, vocab_size).
    return tuple((((raw >> np.uint64(32)) * np.uint64(vocab_size)) >> np.uint64(32)).tolist())
