"""Requests of a trace as a simulation wants them: lengths and block keys, no tokens."""

from collections.abc import Iterable, Sequence

from mooncake_jax.errors import UsageError
from mooncake_jax.request import Request
from mooncake_jax.workload.trace import TRACE_BLOCK, TraceRow

_KEY_BYTES = 8  # a hash id as it is: none is cut, and equal ones are one object


class _Keys(dict[int, bytes]):
    def __missing__(self, hash_id: int) -> bytes:
        try:
            key = self[hash_id] = hash_id.to_bytes(_KEY_BYTES, "little")
        except OverflowError:
            raise UsageError(f"hash id {hash_id} has more than 64 bits; number the trace's blocks anew") from None
        return key


def keyed_requests(rows: Iterable[TraceRow], speed: float = 1.0) -> list[Request]:
    """speed divides the arrival times: 2 is twice as fast. Only full blocks have keys. Raises UsageError."""
    rows, key_of = list(rows), _Keys().__getitem__
    for row in rows:
        if len(set(row.hash_ids)) < len(row.hash_ids):
            raise UsageError(
                f"hash_ids of request {row.index} (counted from 0) name a block twice; correct them: equal ids stand "
                "for equal blocks after equal prefixes, of which a prompt has each once"
            )
    return [
        Request(
            id=str(row.index),
            arrival=row.timestamp / 1000 / speed,
            prompt_tokens=row.input_length,
            output_length=row.output_length,
            block_keys=tuple(map(key_of, row.hash_ids[: row.input_length // TRACE_BLOCK])),
            ignore_eos=True,
        )
        for row in rows
    ]


def arrival_rate(requests: Sequence[Request]) -> float | None:
    """Requests a second from the first arrival to the last; None where they are not spread over time."""
    arrivals = [request.arrival for request in requests]
    span = max(arrivals) - min(arrivals) if arrivals else 0.0
    return (len(arrivals) - 1) / span if span > 0 else None
