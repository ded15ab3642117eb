"""Traces as commands read them: what there is to warn of, and what a trace says of itself, is told on stderr."""

import sys
import warnings
from collections.abc import Callable
from typing import TypeVar

from mooncake_jax.workload.trace import TraceRow, read_sourced

Read = TypeVar("Read")


def read_rows(path: str, command: str, limit: int | None = None) -> tuple[list[TraceRow], str | None]:
    """A trace in Mooncake's format, and the source that it names: every surrogate says that it is one."""
    rows, source = warned(command, lambda: read_sourced(path, limit))
    if source is not None:
        print(f"mooncake-jax {command}: {path}: {source}", file=sys.stderr)
    return rows, source


def warned(command: str, read: Callable[[], Read]) -> Read:
    """What `read` returns; its warnings go to stderr, a line each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = read()
    for warning in caught:
        print(f"mooncake-jax {command}: warning: {warning.message}", file=sys.stderr)
    return value
