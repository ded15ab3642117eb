"""Seeded random numbers that are the same on every machine and Python.

Only `random.Random.random` is used, the one method whose sequence Python promises to keep, and arithmetic that IEEE 754
defines to the last bit: no log, exp or pow, which differ between C libraries.
"""

import hashlib
import random
from collections.abc import Iterable
from typing import TypeVar

Item = TypeVar("Item")

_BELOW_ONE = 1 - 2**-53  # what a sum may round up to 1 is kept below it


class Dice:
    """One stream of numbers, made by its seed: any texts and integers."""

    def __init__(self, *seed: str | int):
        digest = hashlib.sha256(repr(seed).encode()).digest()
        self.uniform = random.Random(int.from_bytes(digest, "big")).random  # in [0, 1)

    def below(self, count: int) -> int:
        """An integer from 0 to count - 1, for counts far below 2**53."""
        return int(self.uniform() * count)

    def exponential(self) -> float:
        """Of mean 1, by von Neumann's comparisons of uniform numbers (1951), which take no logarithm."""
        whole = 0
        while True:
            first = last = self.uniform()
            count = 2
            while (drawn := self.uniform()) < last:
                last = drawn
                count += 1
            if count % 2 == 0:
                return whole + first
            whole += 1

    def shuffled(self, items: Iterable[Item]) -> list[Item]:
        """The items in random order."""
        order = list(items)
        for last in range(len(order) - 1, 0, -1):
            other = self.below(last + 1)
            order[last], order[other] = order[other], order[last]
        return order

    def strata(self, count: int) -> list[float]:
        """One uniform number of each count-th part of [0, 1), ascending: a sample that leaves no quantile out."""
        return [min((place + self.uniform()) / count, _BELOW_ONE) for place in range(count)]
