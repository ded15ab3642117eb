"""PaddedCost: polynomials of what an engine computes, padding included.

This project's engines compute chunks and batches of a few sizes, so that little is compiled: a prompt of 300 tokens
takes as long as one of 512, three requests in a batch as long as four, and attention goes as far as the longest context
for each of them. A polynomial of the lengths themselves is wrong
by 10 to 30 % then.
"""

from dataclasses import dataclass, field

from mooncake_jax.errors import UsageError
from mooncake_jax.sched.cost import PolynomialCost

SHORTEST_CHUNK = 16  # tokens


@dataclass(frozen=True)
class PaddedCost(PolynomialCost):
    """Coefficients as of PolynomialCost, for padded numbers of tokens and requests. chunk: the most tokens that a
    prefill computes at once; the rest of a prompt is padded to a power of two, 16 at least, or to a chunk.
    """

    chunk: int = field(kw_only=True)

    def __post_init__(self):
        if self.chunk < 1:
            raise UsageError(f"chunk is {self.chunk}; it must be at least 1")

    def prefill(self, tokens: int, prefix: int) -> float:
        return super().prefill(prefix + padded_tokens(tokens - prefix, self.chunk), prefix)

    def prefill_compute(self, tokens: int, prefix: int) -> float:
        return super().prefill_compute(prefix + padded_tokens(tokens - prefix, self.chunk), prefix)

    def step(self, batch: int, context: int) -> float:
        """As long as if all had the mean context."""
        padded = padded_batch(batch)
        return super().step(padded, padded * context / max(batch, 1))


def padded_tokens(tokens: int, chunk: int) -> int:
    """What is computed of so many tokens."""
    longest = max(chunk, SHORTEST_CHUNK)
    chunks, rest = divmod(tokens, chunk)
    return chunks * longest + (min(max(power_of_two(rest), SHORTEST_CHUNK), longest) if rest else 0)


def padded_batch(batch: int) -> int:
    return power_of_two(batch) if batch else 0


def power_of_two(least: int) -> int:
    """The first one that is no less."""
    return 1 << (least - 1).bit_length()


def padded_prefills(points: list[tuple[int, int, float]], chunk: int) -> list[tuple[int, int, float]]:
    """Measured (tokens, prefix, seconds) in the terms of PaddedCost's coefficients."""
    return [(prefix + padded_tokens(tokens - prefix, chunk), prefix, seconds) for tokens, prefix, seconds in points]


def padded_steps(points: list[tuple[int, int, float]]) -> list[tuple[int, int, float]]:
    """Measured (batch, total context, seconds) in the terms of PaddedCost's coefficients."""
    padded = [(padded_batch(batch), batch, context, seconds) for batch, context, seconds in points]
    return [(size, size * context / batch, seconds) for size, batch, context, seconds in padded]
