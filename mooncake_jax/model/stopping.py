"""Stop strings: where an answer ends that is to end before a given text.

A stop string may begin inside one token and end inside another, and a token may end inside a character, so what is
searched is text, not tokens. Knows nothing of engines and tokenizers: it is given a function that decodes.
"""

from collections.abc import Callable, Sequence

_WINDOW = 64  # tokens at the end of an answer that are decoded anew with each token, and up to twice as many


class StopStrings:
    """Follows one answer until one of the stop strings is in it."""

    def __init__(self, stops: Sequence[str], decode: Callable[[Sequence[int]], str]):
        """stops are the texts to end before; decode(ids) gives the text of tokens.

        Raises ValueError for an empty stop string.
        """
        if not all(stops):
            raise ValueError("a stop string is empty; leave it out, or give the text to stop at")
        self._stops, self._decode = tuple(stops), decode
        self._ids: list[int] = []

    def add(self, token: int) -> bool:
        """Takes the next token; whether a stop string is in the text now."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if len(self._ids) >= 2 * _WINDOW:
            self._forget_beginning(text)
        return any(stop in text for stop in self._stops)

    def _forget_beginning(self, text: str) -> None:
        """So that a token takes no longer the longer the answer is; but keeps whatever a stop string may begin in."""
        ids = self._ids[-_WINDOW:]
        end = self._decode(ids)
        if len(end) >= max(map(len, self._stops)) and text.endswith(end):
            self._ids = ids


def until_stop(text: str, stops: Sequence[str]) -> str:
    """The text up to where the earliest of the stop strings begins; all of it if none is there."""
    return text[: min((at for at in map(text.find, stops) if at >= 0), default=len(text))]
