"""mooncake-jax trace: what is in a trace, and where to have traces from.

trace stats FILE                 lengths, reuse, hit rates, hottest blocks, arrivals: tables and pictures
trace get NAME...                download released traces
trace generate NAME --out=FILE   the report's Poisson workloads, and surrogates of traces that are not at hand
trace convert IN OUT             between Azure's CSV and Mooncake's JSONL
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from absl import flags

from mooncake_jax.cache.hit_rates import POLICY_NAMES
from mooncake_jax.commands.hit_rates import TABLE_1, parse_capacities, parse_policies
from mooncake_jax.commands.progress import WorkProgress
from mooncake_jax.commands.reading import read_rows, warned
from mooncake_jax.commands.scheduling_flags import as_written, check_out
from mooncake_jax.commands.trace_stats import print_stats
from mooncake_jax.errors import UsageError
from mooncake_jax.workload.azure import read_azure, write_azure
from mooncake_jax.workload.checks import require_requests
from mooncake_jax.workload.contexts import contexts_name, with_contexts
from mooncake_jax.workload.poisson import WORKLOADS, poisson_rows, workload_name
from mooncake_jax.workload.released import RELEASED, Released, fetch_trace
from mooncake_jax.workload.surrogate import RATE, REQUESTS, SHAPES, SURROGATE, surrogate_name, surrogate_rows
from mooncake_jax.workload.trace import TraceRow, write_trace

FLAGS = flags.FlagValues()
EXIT_REFUSED = 2  # as for all that a UsageError ends
_USED = {  # flags that each action looks at
    "stats": ("capacities", "policies", "plot", "limit"),
    "get": ("dir",),
    "generate": ("out", "requests", "rate", "seed"),
    "convert": ("reuse", "limit", "seed"),
}
_OF_CONTEXTS = ("reuse", "seed")  # flags of convert that say what hash ids are made up
_POISSON_REQUESTS = 1000
_MANY = 100_000  # requests that take seconds to make
_EVERY = 1000  # rows between two looks of the progress bar


def _define() -> None:
    kwargs = {"flag_values": FLAGS}
    flags.DEFINE_list("capacities", TABLE_1, "stats: sizes of the pool in blocks; inf: without limit", **kwargs)
    flags.DEFINE_list("policies", ["lru"], f"stats: some of {', '.join(POLICY_NAMES)}", **kwargs)
    flags.DEFINE_string("plot", None, "stats: a picture file, as stats.png (takes matplotlib)", **kwargs)
    flags.DEFINE_string("dir", "traces", "get: folder to keep them in", **kwargs)
    flags.DEFINE_string("out", None, "generate: file to write (default: NAME.jsonl)", **kwargs)
    flags.DEFINE_integer(
        "requests", None, f"generate: how many (default: {REQUESTS} of a surrogate, else {_POISSON_REQUESTS})", **kwargs
    )
    flags.DEFINE_float(
        "rate", None, "generate: requests a second (default: the trace's of a surrogate, else 1)", **kwargs
    )
    flags.DEFINE_float("reuse", 0.0, "convert: share of blocks that prompts are made to have in common", **kwargs)
    flags.DEFINE_integer("limit", None, "stats, convert: only the first requests", **kwargs)
    flags.DEFINE_integer("seed", 0, "generate, convert: equal seeds give equal files", **kwargs)


_define()


def main(arguments: list[str]) -> int:
    for name in FLAGS:
        FLAGS[name].unparse()  # what an earlier call gave
    action, *names = FLAGS(["trace", *arguments])[1:] or [""]
    if action not in _USED:
        raise UsageError(f"trace {action}".rstrip() + f": say what to do, one of {', '.join(_USED)}")
    _check_flags(action)
    return {"stats": _stats, "get": _get, "generate": _generate, "convert": _convert}[action](names)


def _check_flags(action: str) -> None:
    """Raises UsageError for a flag that would be ignored."""
    for name in FLAGS:
        if FLAGS[name].present and name not in _USED[action]:
            raise UsageError(f"{as_written(FLAGS, name)}: trace {action} has no use for it; leave it out")
    check_out(FLAGS)
    if not FLAGS.dir:
        raise UsageError("--dir= is empty; name a folder, or leave it out")


def _stats(names: list[str]) -> int:
    (path,) = _exactly(names, 1, "trace stats FILE")
    capacities, policies = parse_capacities(FLAGS.capacities), parse_policies(FLAGS.policies)
    rows, source = _read(path)
    print_stats(path, rows, source, policies, capacities, FLAGS.plot)
    return 0


def _get(names: list[str]) -> int:
    for name in names:
        _known(name, RELEASED, "trace get")
    if not names:
        raise UsageError(f"trace get: name one or more of {', '.join(RELEASED)}")
    code = 0
    for name in names:
        try:
            _bring(RELEASED[name])
        except UsageError as error:
            print(f"mooncake-jax trace: {' '.join(str(error).split())}", file=sys.stderr)
            code = EXIT_REFUSED
    return code


def _bring(trace: Released) -> None:
    def begun() -> None:
        print(f"getting {trace.url} ({trace.about})", file=sys.stderr, flush=True)

    with WorkProgress("downloading", "downloaded") as progress:
        path, digest = fetch_trace(trace, Path(FLAGS.dir), progress.update, begun)
    checked = "as published" if trace.sha256 or trace.git_blob else "no checksum of it is known to compare"
    print(f"{path}  SHA-256 {digest}, {checked}")


def _generate(names: list[str]) -> int:
    (name,) = _exactly(names, 1, "trace generate NAME")
    _known(name, (*WORKLOADS, *SHAPES), "trace generate")
    path = FLAGS.out or f"{name}.jsonl"
    rate = FLAGS.rate if FLAGS.rate is not None else RATE if name in SHAPES else 1.0
    requests = FLAGS.requests if FLAGS.requests is not None else REQUESTS if name in SHAPES else _POISSON_REQUESTS
    if name in SHAPES:
        _check_name(path)
    require_requests(requests)
    if requests >= _MANY:
        print(f"generating {requests:,} requests", file=sys.stderr, flush=True)
    if name in SHAPES:
        shape = SHAPES[name]
        rows = surrogate_rows(shape, requests, rate, FLAGS.seed)
        source = surrogate_name(shape, rate, FLAGS.seed, requests)
    else:
        rows = poisson_rows(name, requests, rate, FLAGS.seed)
        source = workload_name(name, rate, FLAGS.seed)
    _write(path, rows, source)
    return 0


def _convert(names: list[str]) -> int:
    given, wanted = _exactly(names, 2, "trace convert IN OUT")
    kinds = _kind(given), _kind(wanted)
    if kinds not in ((".csv", ".jsonl"), (".jsonl", ".csv")):
        raise UsageError(f"trace convert {given} {wanted}: one must be Azure's .csv and the other Mooncake's .jsonl")
    rows, source = _read(given)
    if kinds[0] == ".csv":
        reused = with_contexts(rows, FLAGS.reuse, FLAGS.seed)
        _write(wanted, reused, f"lengths of {Path(given).name}; {contexts_name(FLAGS.reuse, FLAGS.seed)}")
    else:
        for name in _OF_CONTEXTS:
            if FLAGS[name].present:
                raise UsageError(f"{as_written(FLAGS, name)}: a .csv has no place for it; leave the flag out")
        if source is not None and source.startswith(SURROGATE):
            _check_name(wanted)
        write_azure(wanted, rows)
        print(f"{wanted}: {len(rows):,} requests, without the hash ids, for which Azure's format has no place")
    return 0


def _read(path: str) -> tuple[list[TraceRow], str | None]:
    """Of either format, by the name's end. Without hash ids where the format has none."""
    if _kind(path) == ".csv":
        return warned("trace", lambda: read_azure(path, FLAGS.limit)), None
    return read_rows(path, "trace", FLAGS.limit)


def _kind(path: str) -> str:
    return Path(path).suffix.lower()


def _check_name(path: str) -> None:
    if "surrogate" not in Path(path).name:
        raise UsageError(f"{path}: a surrogate's file must say so: put 'surrogate' into its name")


def _write(path: str, rows: list[TraceRow], source: str) -> None:
    with WorkProgress("writing", "written") as progress:
        write_trace(path, _told(rows, progress), source)
    print(f"{path}: {len(rows):,} requests; {source}")


def _told(rows: list[TraceRow], progress: WorkProgress) -> Iterator[TraceRow]:
    for place, row in enumerate(rows):
        if not place % _EVERY:
            progress.update(place, len(rows))
        yield row


def _exactly(names: list[str], count: int, usage: str) -> list[str]:
    if len(names) != count:
        raise UsageError(f"{usage}: got {' '.join(names) or 'no name'}; flags are written --name=value")
    return names


def _known(name: str, known: Sequence[str] | dict, usage: str) -> None:
    if name not in known:
        raise UsageError(f"{usage} {name}: there is no such trace; use one of {', '.join(known)}")
