"""What requests wait for in a simulation that has come to a stop, told from what its actors hold."""

from collections.abc import Mapping, Set
from typing import Any

from mooncake_jax.sched.coupled import CoupledInstance
from mooncake_jax.sched.decoding import DecodingInstance
from mooncake_jax.sched.elastic_instance import ElasticInstance
from mooncake_jax.sched.messages import CONDUCTOR
from mooncake_jax.sched.prefill import PrefillInstance

_SHOWN = 5


def what_waits(unended: Set[str], actors: Mapping[str, Any]) -> str:
    """One line: how many of these requests, by id, wait for what at which node, and which they are."""
    conductor = actors[CONDUCTOR]
    waiting: dict[str, list[str]] = {}
    for request_id in sorted(unended):
        entry = conductor.open.get(request_id)
        if entry is None:
            reason = "for Conductor to dispatch or end them"
        else:
            reason = _reason(entry.dispatch, conductor, actors)
        waiting.setdefault(reason, []).append(request_id)
    told = "; ".join(f"{len(ids)} {reason} ({_some(ids)})" for reason, ids in waiting.items())
    return f"nothing more happens, and {len(unended)} requests wait: {told}"


def _reason(dispatch: int, conductor: Any, actors: Mapping[str, Any]) -> str:
    attempt = conductor.attempts[dispatch]
    prefill, decoding = actors[attempt.prefill], actors[attempt.decoding]
    if isinstance(prefill, CoupledInstance) and (reason := _at_coupled(dispatch, prefill)) is not None:
        return reason
    if isinstance(prefill, ElasticInstance):
        prefill = prefill.prefill
    if isinstance(decoding, ElasticInstance):
        decoding = decoding.decoding
    reason = None
    if isinstance(decoding, DecodingInstance):
        reason = _at_decoding(dispatch, decoding)
    if reason is None and isinstance(prefill, PrefillInstance):
        reason = _at_prefill(dispatch, prefill)
    if reason is not None:
        return reason
    if dispatch in conductor.reservations and conductor.reservations.prefilling(dispatch):
        return f"for {attempt.prefill} to take them on"
    return f"for their KVCache to arrive at {attempt.decoding}"


def _at_prefill(dispatch: int, prefill: PrefillInstance) -> str | None:
    if dispatch in prefill.running:
        return f"for their prefill at {prefill.name} to end"
    start = next((start for start in prefill.queue if start.dispatch == dispatch), None)
    if start is None:
        return None
    for source, awaited in (("its SSD", prefill.promoting), ("another instance", prefill.copying)):
        coming = {block for blocks in awaited.values() for block in blocks}
        if not coming.isdisjoint(start.blocks):
            return f"for blocks that {prefill.name} gets from {source}"
    return f"for their turn at {prefill.name}"


def _at_decoding(dispatch: int, decoding: DecodingInstance) -> str | None:
    if dispatch in decoding.batch:
        return f"for their next token from {decoding.name}"
    if dispatch == decoding.inlining or dispatch in decoding.to_inline:
        return f"for their prefill at {decoding.name} to end"
    if dispatch in decoding.loading:
        return f"for their KVCache to be loaded at {decoding.name}"
    if any(received.dispatch == dispatch for received in decoding.waiting):
        return f"for room in the batch or the memory of {decoding.name}"
    return None


def _at_coupled(dispatch: int, coupled: CoupledInstance) -> str | None:
    if dispatch in coupled.batch:
        return f"for their next token from {coupled.name}"
    if dispatch in coupled.prefilling:
        return f"for their prefill at {coupled.name} to end"
    if any(start.dispatch == dispatch for start in coupled.waiting):
        return f"for their turn at {coupled.name}"
    return None


def _some(ids: list[str]) -> str:
    return ", ".join(ids[:_SHOWN]) + (", ..." if len(ids) > _SHOWN else "")
