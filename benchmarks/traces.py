"""Traces as benchmarks read them: what made a trace, where it says so, is printed above the table."""

from mooncake_jax.workload.trace import TraceRow, read_sourced


def read_told(path: str, limit: int | None) -> list[TraceRow]:
    """As read_trace: every surrogate says that it is one. Raises UsageError."""
    rows, source = read_sourced(path, limit)
    if source is not None:
        print(f"{path}: {source}", flush=True)
    return rows
