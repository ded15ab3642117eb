"""Elastic roles: prefill instances that decode while decoding is short of instances (the report names switching nodes
between prefill and decoding as future work).

An instance hosts both local schedulers (elastic_instance.py), so a change of role is one of Conductor's view alone: no
instance hears of it, and what runs where it ran goes on. A role policy says who is to move; ElasticRoles asks it as
requests arrive and, while any is open, at intervals, and does what it says. What a moved instance has stored stays in
the KVCache pool and can be copied from it. Knows nothing of requests and their dispatches.
"""

import math
from collections.abc import Set
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from mooncake_jax.sched.actions import Later
from mooncake_jax.sched.messages import ReviewRoles
from mooncake_jax.sched.view import ClusterView

PREFILL, DECODING = "prefill", "decoding"


@dataclass(frozen=True, slots=True)
class Move:
    """This instance is to take that role. To DECODING: a prefill instance with nothing to do, at once. To PREFILL: one
    that has moved before, which gets no new requests and is back once it holds none.
    """

    node: str
    role: str


class RolePolicy(Protocol):
    """review_s: seconds between two looks while no request arrives."""

    review_s: float

    def review(self, view: ClusterView, now: float) -> Move | None:
        """What is to change now. Reads the view and changes nothing in it, but may keep state of its own."""


class DivergingLoads:
    """Moves an instance to the pool whose load is at least BUSY, and more than FACTOR times the other's, at every look
    for after_s seconds. Each move waits for as long again, in which the last one shows what it has brought.

    Loads are those of report 7.1, for which the cluster's own SLOs must be finite. Without BUSY, a lone request would
    count as divergence: its step takes a good part of the SLO already.
    """

    FACTOR = 2.0
    BUSY = 0.5

    def __init__(self, after_s: float):
        self.after_s, self.review_s = after_s, after_s / 10
        self._short: str | None = None  # the role whose pool is short of instances
        self._since = 0.0

    def review(self, view: ClusterView, now: float) -> Move | None:
        short = self._short_of(prefill_load(view, now), decoding_load(view))
        if short != self._short:
            self._short, self._since = short, now
        if short is None or now - self._since < self.after_s:
            return None
        move = _to_decoding(view) if short == DECODING else _to_prefill(view)
        if move is not None:
            self._since = now
        return move

    def _short_of(self, prefill: float, decoding: float) -> str | None:
        if decoding >= self.BUSY and decoding > self.FACTOR * prefill:
            return DECODING
        if prefill >= self.BUSY and prefill > self.FACTOR * decoding:
            return PREFILL
        return None


def prefill_load(view: ClusterView, now: float) -> float:
    """Mean over the prefill instances of the TTFT predicted for the shortest of prompts, T_queue, over its SLO;
    infinite if there are none.
    """
    queued = [queue.seconds(now) for queue in view.prefill.values()]
    return math.fsum(queued) / len(queued) / view.slo.ttft if queued else math.inf


def decoding_load(view: ClusterView) -> float:
    """Mean over the decoding instances of their predicted TBT over its SLO; infinite if there are none. Requests count
    once their prefill has ended: else a long prefill queue would be the decoding pool's load.
    """
    seconds = []
    for load in view.decoding.values():
        contexts = [request.context for request in load.requests.values() if request.prefilled]
        seconds.append(view.cost.step(len(contexts), sum(contexts)) if contexts else 0.0)
    return math.fsum(seconds) / len(seconds) / view.slo.tbt if seconds else math.inf


def _to_decoding(view: ClusterView) -> Move | None:
    """One that is on its way back, or else, of the idle prefill instances, the one that keeps the fewest blocks."""
    if view.draining:
        return Move(next(iter(view.draining)), DECODING)
    idle = [node for node, queue in view.prefill.items() if not len(queue)]
    if not idle or len(view.prefill) == 1:
        return None
    kept = view.pool.blocks()
    return Move(min(idle, key=lambda node: sum(kept[node])), DECODING)


def _to_prefill(view: ClusterView) -> Move | None:
    """Of those that have moved, the one with the fewest requests."""
    moved = [node for node in view.moved if node in view.decoding]
    if not moved or len(view.decoding) == 1:
        return None
    return Move(min(moved, key=lambda node: len(view.decoding[node].requests)), PREFILL)


@dataclass(frozen=True, slots=True)
class RoleChange:
    """at_s: seconds since the start of the run; of one that goes back, when it held no request any more."""

    at_s: float
    node: str
    role: str


class ElasticRoles:
    """changes: of roles, until now."""

    def __init__(self, policy: RolePolicy, view: ClusterView):
        self.policy, self._view = policy, view
        self.changes: list[RoleChange] = []
        self._looks_again = False
        self._leaving: dict[str, Set[int]] = {}  # dispatches at those that are to go back, as that was decided

    def arrived(self, now: float) -> list[Later]:
        """Called before a request is dispatched."""
        self._review(now)
        return [] if self._looks_again else self._look_again(True)

    def due(self, now: float, open_requests: bool) -> list[Later]:
        """A look that was asked for."""
        self._review(now)
        return self._look_again(open_requests)

    def _look_again(self, wanted: bool) -> list[Later]:
        self._looks_again = wanted
        return [Later(self.policy.review_s, ReviewRoles())] if wanted else []

    def _review(self, now: float) -> None:
        view = self._view
        for node in [node for node, load in view.draining.items() if not load.requests]:
            view.prefill_again(node)
            self.changes.append(RoleChange(now, node, PREFILL))
        match self.policy.review(view, now):
            case Move(node, role) if role == PREFILL:
                view.drain(node)
                self._leaving[node] = frozenset(view.draining[node].requests)
            case Move(node) if node in view.draining:
                view.decode_on(node)
            case Move(node):
                view.decode(node)
                self.changes.append(RoleChange(now, node, DECODING))

    def summary(self) -> dict[str, Any]:
        """For summary.json."""
        counts = {f"to_{role}": sum(c.role == role for c in self.changes) for role in (DECODING, PREFILL)}
        return counts | {"changes": [asdict(change) for change in self.changes]}

    def check(self) -> None:
        """Assert the invariants."""
        for node, load in self._view.draining.items():
            assert load.requests.keys() <= self._leaving[node], f"{node} is to go back, and got new requests"
