"""Anybody's values and errors as text that can be written and shown: one line, not long, of characters that print."""

import re

LONGEST = 200  # characters of a reason
_LONGEST_VALUE = 60
_ADDRESS = re.compile(" at 0x[0-9a-fA-F]+")  # where an object lies is another place in every process


def one_line(text: str) -> str:
    """It without line breaks, cut if it is long; what does not print, half a surrogate pair too, as an escape."""
    line = " ".join(text.split())
    if not line.isprintable():
        line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line[: LONGEST + 1])
    return line if len(line) <= LONGEST else line[: LONGEST - 3] + "..."


def shown(value: object) -> str:
    """The beginning of its repr()."""
    try:
        return _ADDRESS.sub("", repr(value))[:_LONGEST_VALUE]
    except Exception:  # it is anybody's code
        return f"a {type(value).__name__} that cannot be shown"


def told(error: BaseException) -> str:
    """What was raised, and what it says."""
    try:
        return _ADDRESS.sub("", f"{type(error).__name__}: {error}")
    except Exception:  # it is anybody's code
        return f"a {type(error).__name__} that cannot be shown"
