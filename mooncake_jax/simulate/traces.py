"""Requests of a trace as a simulation wants them: lengths and block keys, no tokens."""

import os
from collections.abc import Callable, Iterable, Sequence

from mooncake_jax.errors import UsageError
from mooncake_jax.request import Request
from mooncake_jax.workload.checks import shown
from mooncake_jax.workload.jsonl import line_error, line_of_object
from mooncake_jax.workload.trace import TRACE_BLOCK, TraceRow

_KEY_BYTES = 8  # a hash id as it is: none is cut, and equal ones are one object


class _Keys(dict[int, bytes]):
    def __missing__(self, hash_id: int) -> bytes:
        key = self[hash_id] = hash_id.to_bytes(_KEY_BYTES, "little")
        return key


def keyed_requests(
    rows: Iterable[TraceRow], speed: float = 1.0, path: str | os.PathLike | None = None
) -> list[Request]:
    """speed divides the arrival times: 2 is twice as fast; path: where the rows were read, to be named in errors. Only
    full blocks have keys. Raises UsageError.
    """
    key_of = _Keys().__getitem__
    return [_keyed(row, key_of, speed, path) for row in rows]


def _keyed(row: TraceRow, key_of: Callable[[int], bytes], speed: float, path: str | os.PathLike | None) -> Request:
    full = row.hash_ids[: row.input_length // TRACE_BLOCK]
    if len(set(row.hash_ids)) < len(row.hash_ids):
        twice = next(block for place, block in enumerate(row.hash_ids) if block in row.hash_ids[:place])
        why = "equal ids stand for equal blocks after equal prefixes, of which a prompt has each once"
        raise _row_error(path, row, f"field hash_ids names block {shown(twice)} twice; correct it: {why}")
    try:
        keys = tuple(map(key_of, full))
    except OverflowError:
        large = next(block for block in full if block.bit_length() > 8 * _KEY_BYTES)
        raise _row_error(
            path, row, f"hash id {shown(large)} has more than {8 * _KEY_BYTES} bits; number the trace's blocks anew"
        ) from None
    return Request(
        id=str(row.index),
        arrival=row.timestamp / 1000 / speed,
        prompt_tokens=row.input_length,
        output_length=row.output_length,
        block_keys=keys,
        ignore_eos=True,
    )


def _row_error(path: str | os.PathLike | None, row: TraceRow, problem: str) -> UsageError:
    if path is None:
        return UsageError(f"request {row.index} (counted from 0): {problem}")
    return line_error(path, line_of_object(path, row.index), problem)


def arrival_rate(requests: Sequence[Request]) -> float | None:
    """Requests a second from the first arrival to the last; None where they are not spread over time."""
    arrivals = [request.arrival for request in requests]
    span = max(arrivals) - min(arrivals) if arrivals else 0.0
    return (len(arrivals) - 1) / span if span > 0 else None
