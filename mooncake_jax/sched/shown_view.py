"""The view of the cluster as anybody's code is shown it: it can add no instance and take none away, and what else it
changes is noticed.

That is for mistakes, not for malice: a view cannot be read-only as deep as it goes without a copy for every decision.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from mooncake_jax.sched.view import ClusterView

COPIES = "the pace of copies"


def read_only(view: ClusterView) -> ClusterView:
    """The same instances, in mappings that cannot be changed."""
    names = ("prefill", "decoding", "moved", "draining")
    return replace(view, **{name: MappingProxyType(getattr(view, name)) for name in names})


def state(view: ClusterView, now: float) -> dict[str, tuple]:
    """What a scheduler might change by mistake, by what it belongs to."""
    queues = {
        f"the queue of {node}": (queue.seconds(now), len(queue), queue.pace.factor)
        for node, queue in view.prefill.items()
    }
    loads = {
        f"the load of {node}": (load.context, len(load.requests), load.tightest_tbt, len(load.inlining))
        for node, load in view.decoding.items()
    }
    return {**queues, **loads, COPIES: (view.transfer_pace.factor,)}


def first_changed(before: Mapping[str, tuple], after: Mapping[str, tuple]) -> str | None:
    """Of two states of the same instances."""
    if before == after:
        return None
    return next(name for name in before if before[name] != after[name])
