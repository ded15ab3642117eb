"""Checks shared by the workload's readers and generators: what is an integer, what a number, and how a bad one is told.

Knows nothing of prompts or traces.
"""

import json

from mooncake_jax.errors import UsageError

MOST_REQUESTS = 10**6  # of a made-up trace, which is made in memory
LARGEST_NUMBER = 2**53  # every integer up to it is exact as a float


def is_integer(value: object, least: int) -> bool:
    """True for an int of at least `least`; a bool is no integer, and neither is 3.0."""
    return type(value) is int and value >= least


def is_number(value: object) -> bool:
    """True for an int or float (no bool, no NaN) from 0 to LARGEST_NUMBER."""
    return type(value) in (int, float) and 0 <= value <= LARGEST_NUMBER


def require_requests(requests: object) -> None:
    """Raises UsageError naming the flag, unless a trace of so many requests can be made up."""
    ok = is_integer(requests, 1) and requests <= MOST_REQUESTS
    require(ok, "requests", requests, f"an integer from 1 to {MOST_REQUESTS:,}")


def shown(value: object) -> str:
    """The value as JSON, on one short line of ASCII, for an error message."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def require(ok: bool, flag: str, value: object, wanted: str) -> None:
    """Raises UsageError naming the flag and the value received, unless ok."""
    if not ok:
        raise UsageError(f"--{flag}={shown(value)}: must be {wanted}")
