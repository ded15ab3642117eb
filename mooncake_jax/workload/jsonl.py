"""Reads files that hold one JSON object a line, and tells which line is bad.

Knows nothing of what the objects mean.
"""

import codecs
import json
import os
from collections.abc import Iterator
from itertools import islice

from mooncake_jax.errors import UsageError
from mooncake_jax.workload.checks import shown


def read_objects(path: str | os.PathLike, limit: int | None = None) -> Iterator[tuple[int, dict]]:
    """Yields (line number from 1, object) for the first `limit` lines (None: all); blank lines are passed over.

    Raises UsageError for a file that cannot be read or holds no line, and for a line that is no JSON object in UTF-8 or
    gives a key twice.
    """
    found = 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.isspace():
                    continue
                yield number, _parse(path, number, line)
                found += 1
                if found == limit:
                    return
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error}); name a readable file") from None
    if not found:
        raise UsageError(f"{path}: the file is empty; it must hold one JSON object a line")


def line_of_object(path: str | os.PathLike, index: int) -> int:
    """The number, from 1, of the line that holds the index-th object, from 0. Raises UsageError as read_objects()."""
    return next(islice(read_objects(path), index, None))[0]


def line_error(path: str | os.PathLike, number: int, problem: str) -> UsageError:
    """An error about one line of a file."""
    return UsageError(f"{path}, line {number}: {problem}")


def field_error(path: str | os.PathLike, number: int, field: str, value: object, wanted: str) -> UsageError:
    """An error about one field of one line of a file."""
    return line_error(path, number, f"field {field} is {shown(value)}; it must be {wanted}")


def _parse(path: str | os.PathLike, number: int, line: bytes) -> dict:
    try:
        value = _decode(line.decode("utf-8"))
    except _KeyTwice as error:
        raise line_error(path, number, f"key {shown(error.args[0])} is given twice; keep one") from None
    except UnicodeDecodeError as error:
        raise line_error(path, number, f"not UTF-8 (at byte {error.start + 1} of the line); save it as UTF-8") from None
    except (ValueError, RecursionError) as error:
        text = shown(line.decode("utf-8").strip())
        raise line_error(path, number, f"{text} is not JSON ({getattr(error, 'msg', error)}); correct it") from None
    if not isinstance(value, dict):
        raise line_error(path, number, f"{shown(value)} is no JSON object; write one {{...}} a line")
    return value


class _KeyTwice(Exception):
    """An object gives this key twice."""


def _keys_once(pairs: list[tuple[str, object]]) -> dict:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _KeyTwice(next(key for place, key in enumerate(keys) if key in keys[:place]))
    return fields


_decode = json.JSONDecoder(object_pairs_hook=_keys_once).decode
