"""Azure's LLM inference traces of 2023 and 2024: CSV of lengths, without text or hash ids.

The columns are `TIMESTAMP` (2023-11-16 18:17:03.9799600, in 2024 with +00:00 behind it), `ContextTokens` and
`GeneratedTokens`. What prompts have in common is not in them: see contexts.py for a way to make it up.
"""

import codecs
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import islice

from mooncake_jax.errors import UsageError
from mooncake_jax.workload.checks import is_integer, require, shown
from mooncake_jax.workload.files import write_whole
from mooncake_jax.workload.jsonl import line_error
from mooncake_jax.workload.trace import TraceRow, in_order_of_time

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_HEADER = ",".join(COLUMNS)
_START = datetime(1970, 1, 1)  # of the traces that are written: Mooncake's only know milliseconds from their start
_MOST_TOKENS = 2**31


def read_azure(path: str | os.PathLike, limit: int | None = None) -> list[TraceRow]:
    """The first `limit` rows (None: all) in order of time, which starts with the earliest at 0; hash_ids are empty.

    Warns, with their number, where rows had to be sorted. Raises UsageError naming file, line and column.
    """
    require(limit is None or is_integer(limit, 1), "limit", limit, "an integer of at least 1")
    moments, rows = [], []
    for number, line in islice(_lines(path), limit):
        moment, context, generated = _values(path, number, line)
        if moments and (moment.tzinfo is None) != (moments[0].tzinfo is None):
            raise line_error(
                path, number, f"TIMESTAMP {shown(str(moment))} has a time zone or lacks it, unlike the first row"
            )
        moments.append(moment)
        rows.append(TraceRow(0, context, generated, (), len(rows)))
    if not rows:
        raise UsageError(f"{path}: the trace is empty; it must hold one request a line after {_HEADER}")
    first = min(moments)
    timed = [replace(row, timestamp=_milliseconds(moment - first)) for row, moment in zip(rows, moments)]
    return in_order_of_time(path, timed)


def write_azure(path: str | os.PathLike, rows: Iterable[TraceRow]) -> None:
    """The rows' times and lengths; their hash ids have no place there. Raises UsageError where it cannot be written."""
    lines = [f"{_moment(path, row)},{row.input_length},{row.output_length}\n" for row in rows]
    write_whole(path, [_HEADER + "\n", *lines])


def _lines(path: str | os.PathLike) -> Iterator[tuple[int, str]]:
    """(line number from 1, line) of what stands below the header; blank lines are passed over."""
    try:
        with open(path, "rb") as file:
            header = file.readline().removeprefix(codecs.BOM_UTF8)
            if header.strip() != _HEADER.encode():
                text = shown(header.decode("utf-8", "replace").strip())
                raise line_error(path, 1, f"the header is {text}; it must be {_HEADER}")
            for number, line in enumerate(file, 2):
                if not line.isspace():
                    yield number, line.decode("utf-8", "replace").strip()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error}); name a readable file") from None


def _values(path: str | os.PathLike, number: int, line: str) -> tuple[datetime, int, int]:
    columns = line.split(",")
    if len(columns) != len(COLUMNS):
        raise line_error(path, number, f"{shown(line)} has {len(columns)} columns; it must have {_HEADER}")
    try:
        moment = datetime.fromisoformat(columns[0])
    except ValueError:
        wanted = "it must be a date and time, as 2023-11-16 18:17:03.9799600"
        raise line_error(path, number, f"TIMESTAMP is {shown(columns[0])}; {wanted}") from None
    return moment, _tokens(path, number, COLUMNS[1], columns[1]), _tokens(path, number, COLUMNS[2], columns[2])


def _tokens(path: str | os.PathLike, number: int, column: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) < _MOST_TOKENS):
        raise line_error(path, number, f"{column} is {shown(text)}; it must be an integer number of tokens, below 2^31")
    return int(text)


def _milliseconds(passed: timedelta) -> float:
    microseconds = passed // timedelta(microseconds=1)
    return microseconds // 1000 if microseconds % 1000 == 0 else microseconds / 1000


def _moment(path: str | os.PathLike, row: TraceRow) -> str:
    try:
        moment = _START + timedelta(microseconds=round(row.timestamp * 1000))
    except OverflowError:
        raise UsageError(
            f"{path}: cannot be written: timestamp {row.timestamp} of request {row.index} (counted from 0) lies beyond "
            "the year 9999, where Azure's format ends; correct it"
        ) from None
    return moment.isoformat(" ", "microseconds") + "0"
