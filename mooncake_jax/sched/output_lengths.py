"""OutputLengths: how many tokens a request still has to come, learned from the outputs that have ended.

The report names it as future work (7.4). Prompts of about the same length are taken together, by powers of two. Only
ended outputs are known, so that in the first minutes of a run, when the long ones have not ended yet, they are
underestimated. Knows nothing of what a request asked for.
"""

from bisect import bisect_right
from collections import deque

RECENT = 256  # outputs of a class that are remembered
ENOUGH = 8  # of a class, for it to be judged by its own


class _Sample:
    """The latest outputs of one class, ready to be asked."""

    def __init__(self):
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._ordered: list[int] = []
        self._sums: list[int] = [0]  # [i]: of the i longest

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, tokens: int) -> None:
        self._recent.append(tokens)
        self._ordered = sorted(self._recent)
        self._sums = [0]
        for longest in reversed(self._ordered):
            self._sums.append(self._sums[-1] + longest)

    def remaining(self, produced: int) -> float:
        longer = len(self._ordered) - bisect_right(self._ordered, produced)
        return self._sums[longer] / longer - produced if longer else float(produced)


class OutputLengths:
    def __init__(self):
        self._all, self._classes = _Sample(), {}

    def learn(self, prompt_tokens: int, output_tokens: int) -> None:
        """A request has completed with so many tokens."""
        self._all.add(output_tokens)
        self._classes.setdefault(prompt_tokens.bit_length(), _Sample()).add(output_tokens)

    def remaining(self, prompt_tokens: int, produced: int) -> float | None:
        """Mean tokens to come of those that got so far; of one longer than all that are known, as many again. None
        while nothing has ended.
        """
        sample = self._classes.get(prompt_tokens.bit_length())
        if sample is None or len(sample) < ENOUGH:
            sample = self._all
        return sample.remaining(produced) if len(sample) else None
