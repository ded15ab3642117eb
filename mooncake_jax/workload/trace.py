"""Mooncake's request traces, and requests made from them (report 4).

One JSON object a line: `timestamp` (ms since the start), `input_length` and `output_length` (tokens), `hash_ids` (one
for each 512-token block of the input, the last of which may be partial; equal ids stand for equal blocks after equal
prefixes). A trace carries no text: tokens are made up from the hash ids. Knows nothing of block keys, which the cache
makes for itself.
"""

import functools
import json
import os
import warnings
from collections.abc import Callable, Iterable
from itertools import chain, islice

from mooncake_jax.records import record
from mooncake_jax.request import Request
from mooncake_jax.workload.checks import is_integer, is_number, require
from mooncake_jax.workload.files import write_whole
from mooncake_jax.workload.jsonl import field_error, line_error, read_objects
from mooncake_jax.workload.tokens import seeded_tokens

TRACE_BLOCK = 512  # tokens to a hash id
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


@record
class TraceRow:
    """One request of a trace. timestamp in ms; lengths in tokens; index: the place of its line in the file, from 0."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    index: int


def read_trace(path: str | os.PathLike, limit: int | None = None) -> list[TraceRow]:
    """The first `limit` rows of a trace (None: all), in order of their timestamps; other fields are passed over.

    Warns, with their number, where rows had to be sorted. Raises UsageError naming file, line and field.
    """
    return read_sourced(path, limit)[0]


def read_sourced(path: str | os.PathLike, limit: int | None = None) -> tuple[list[TraceRow], str | None]:
    """As read_trace; and what made the trace, where its first row says so in `source`, as a surrogate's always does."""
    require(limit is None or is_integer(limit, 1), "limit", limit, "an integer of at least 1")
    rows, source = [], None
    for index, (number, fields) in enumerate(read_objects(path, limit)):
        rows.append(_row(path, number, index, fields))
        if index == 0 and type(fields.get("source")) is str:
            source = "".join(letter if letter.isprintable() else " " for letter in fields["source"])
    return in_order_of_time(path, rows), source


def write_trace(path: str | os.PathLike, rows: Iterable[TraceRow], source: str) -> None:
    """Writes a file that read_trace reads back; its first row says in `source` what made it. Raises UsageError."""
    write_whole(path, (_line(row, source if place == 0 else None) for place, row in enumerate(rows)))


def in_order_of_time(path: str | os.PathLike, rows: list[TraceRow]) -> list[TraceRow]:
    """The rows, sorted if need be: then it warns, with the number of those that came too late, and names the file."""
    latest, late = 0, 0
    for row in rows:
        late += row.timestamp < latest
        latest = max(latest, row.timestamp)
    if late:
        warnings.warn(f"{path}: {late} of {len(rows)} rows were out of order in time; sorted", stacklevel=2)
        rows = sorted(rows, key=lambda row: row.timestamp)
    return rows


def _line(row: TraceRow, source: str | None) -> str:
    fields = {name: getattr(row, name) for name in FIELDS}
    return json.dumps(fields | ({} if source is None else {"source": source})) + "\n"


def _row(path: str | os.PathLike, number: int, index: int, fields: dict) -> TraceRow:
    try:
        timestamp, input_length, output_length, hash_ids = [fields[name] for name in FIELDS]
    except KeyError as error:
        raise line_error(path, number, f"no field {error.args[0]}; a row needs {', '.join(FIELDS)}") from None
    if not is_number(timestamp):
        raise field_error(path, number, "timestamp", timestamp, "a number of milliseconds, not negative")
    for name in ("input_length", "output_length"):
        if not is_integer(fields[name], 0):
            raise field_error(path, number, name, fields[name], "an integer number of tokens, not negative")
    if type(hash_ids) is not list or set(map(type, hash_ids)) - {int} or min(hash_ids, default=0) < 0:
        raise field_error(path, number, "hash_ids", hash_ids, "a list of integers, none negative")
    blocks = -(-input_length // TRACE_BLOCK)
    if len(hash_ids) != blocks:
        wanted = f"{blocks} for an input_length of {input_length}: one for each block of {TRACE_BLOCK} tokens"
        raise line_error(path, number, f"field hash_ids has {len(hash_ids)} ids; it must have {wanted}")
    return TraceRow(timestamp, input_length, output_length, tuple(hash_ids), index)


def trace_requests(
    rows: Iterable[TraceRow],
    *,
    vocab_size: int,
    seed: int,
    length_scale: int = 1,
    time_scale: float = 1.0,
    block_size: int = TRACE_BLOCK,
) -> list[Request]:
    """Requests with made-up tokens: equal hash ids give equal blocks and, vocab_size permitting, other ids others.

    length_scale divides the lengths (rounded up) and with them the trace's blocks, to 512 / length_scale tokens; with a
    cache block_size (tokens) of just that, reuse is the trace's, block for block. A block that is partial in the trace
    stays partial: where its rest rounds up to a full block, it loses a token (its only one at a length_scale of 512).
    time_scale divides the arrival times: 2 is twice as fast. Ids are the rows' indices.
    Warns where block_size differs from the scaled blocks. Raises UsageError naming the flag.
    """
    divides = is_integer(length_scale, 1) and TRACE_BLOCK % length_scale == 0
    require(divides, "length_scale", length_scale, f"a positive integer that divides {TRACE_BLOCK}: 1, 2, 4, ...")
    require(is_number(time_scale) and time_scale > 0, "time_scale", time_scale, "a number above 0")
    require(is_integer(seed, 0), "seed", seed, "an integer, not negative")
    require(is_integer(vocab_size, 1), "vocab_size", vocab_size, "an integer of at least 1")
    require(is_integer(block_size, 1), "block_size", block_size, "an integer of at least 1")
    block_tokens = TRACE_BLOCK // length_scale
    if block_tokens != block_size:
        warnings.warn(
            f"the trace's blocks have {block_tokens} tokens (512 / --length_scale={length_scale}) and the cache's "
            f"--block_size={block_size}: reuse will differ from the trace's; --block_size={block_tokens} keeps it",
            stacklevel=2,
        )
    block = functools.cache(lambda hash_id: seeded_tokens((seed, hash_id), block_tokens, vocab_size))
    return [_request(row, block, length_scale, time_scale) for row in rows]


def _request(row: TraceRow, block: Callable[[int], tuple], length_scale: int, time_scale: float) -> Request:
    block_tokens = TRACE_BLOCK // length_scale
    full, rest = divmod(row.input_length, TRACE_BLOCK)
    length = full * block_tokens + min(-(-rest // length_scale), block_tokens - 1)
    tokens = chain.from_iterable(block(hash_id) for hash_id in row.hash_ids)
    return Request(
        id=str(row.index),
        arrival=row.timestamp / 1000 / time_scale,
        prompt_tokens=length,
        output_length=-(-row.output_length // length_scale),
        prompt_ids=tuple(islice(tokens, length)),
        ignore_eos=True,
    )
