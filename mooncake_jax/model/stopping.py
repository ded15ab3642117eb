"""Stop strings: where an answer ends that is to end before a given text.

A stop string may begin inside one token and end inside another, and a token may end inside a character, so the text is
searched as a whole while it grows, and its end is held back as long as a stop string may be coming. Knows nothing of
engines and tokenizers: it is given a function that decodes.
"""

from collections.abc import Callable, Sequence

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what decoders give for a character whose last bytes are yet to come


class StopStrings:
    """Follows one answer. Plain state; `text` is what may be shown so far and never takes anything back."""

    def __init__(self, stops: Sequence[str], decode: Callable[[Sequence[int]], str]):
        """stops are the texts to end before; decode(ids) gives the text of all tokens so far.

        Raises ValueError for an empty stop string.
        """
        if not all(stops):
            raise ValueError("a stop string is empty; leave it out, or give the text to stop at")
        self._stops, self._decode = tuple(stops), decode
        self._ids: list[int] = []
        self.text = ""
        self.stopped = False

    def add(self, token: int) -> bool:
        """Takes the next token; True if a stop string has appeared: `text` then ends before the earliest one.

        Raises ValueError if the answer has stopped already.
        """
        if self.stopped:
            raise ValueError("the answer has stopped; it takes no more tokens")
        self._ids.append(token)
        whole = self._decode(self._ids)
        shown = until_stop(whole, self._stops)
        self.stopped = shown != whole
        if not self.stopped:
            shown = whole[: len(whole) - self._held_back(whole)]
        self.text = max(self.text, shown, key=len)
        return self.stopped

    def finish(self) -> str:
        """The whole answer, when no more tokens come: what was held back is part of it unless it has stopped."""
        if not self.stopped:
            self.text = self._decode(self._ids)
        return self.text

    def _held_back(self, text: str) -> int:
        """Characters at the end that are unfinished or may be the beginning of a stop string."""
        unfinished = len(text) - len(text.rstrip(_UNFINISHED))
        text = text[: len(text) - unfinished]
        begun = max(
            (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])),
            default=0,
        )
        return unfinished + begun


def until_stop(text: str, stops: Sequence[str]) -> str:
    """The text up to where the earliest of the stop strings begins; all of it if none is there."""
    return text[: min((at for at in map(text.find, stops) if at >= 0), default=len(text))]
