"""The view of the cluster as anybody's code is shown it: it can add no instance and take none away, and what else it
changes is noticed.

That is for mistakes, not for malice: a view cannot be read-only as deep as it goes without a copy for every decision.
"""

from dataclasses import replace
from types import MappingProxyType

from mooncake_jax.sched.view import ClusterView

State = list[tuple[float, ...]]


def read_only(view: ClusterView) -> ClusterView:
    """The same instances, in mappings that cannot be changed."""
    names = ("prefill", "decoding", "moved", "draining")
    return replace(view, **{name: MappingProxyType(getattr(view, name)) for name in names})


def state(view: ClusterView, now: float) -> State:
    """What a scheduler might change by mistake: of each prefill and each decoding instance, and of copies."""
    queues = [(queue.seconds(now), queue.pace.factor) for queue in view.prefill.values()]
    loads = [(load.context, len(load.requests), load.tightest_tbt) for load in view.decoding.values()]
    return [*queues, *loads, (view.transfer_pace.factor,)]


def first_changed(view: ClusterView, before: State, after: State) -> str | None:
    """Of what two states of this view differ, if they do."""
    if before == after:
        return None
    queues, loads = (f"the queue of {node}" for node in view.prefill), (f"the load of {node}" for node in view.decoding)
    changed = zip((*queues, *loads, "the pace of copies"), before, after, strict=True)
    return next(what for what, old, new in changed if old != new)
