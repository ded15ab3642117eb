"""Prefill policies: which prefill instance a request goes to (report 6.1). The baselines; algorithm 1 itself is in
kvcache_centric.py.

A policy reads the view and the request and returns Dispatch or Reject. It changes nothing in them, but may keep state
of its own. It decides by that alone: no clock, no randomness without a seed. Whether a request is served at all says
an Admission (admission.py). It is asked only while instances of both kinds are alive.
"""

from typing import Protocol

from mooncake_jax.sched.decisions import Dispatch, Reject
from mooncake_jax.sched.placement import dispatch_to
from mooncake_jax.sched.splitmix import STEP, mixed
from mooncake_jax.sched.view import ClusterView, RequestView


class Policy(Protocol):
    """What --policy names."""

    def choose(self, request: RequestView, view: ClusterView, now: float) -> Dispatch | Reject: ...


class RandomChoice:
    """Any instance, each equally likely. The same seed chooses the same again, on every machine."""

    def __init__(self, seed: int = 0):
        self._state = seed

    def choose(self, request: RequestView, view: ClusterView, now: float) -> Dispatch:
        return dispatch_to(list(view.prefill)[self._draw() % len(view.prefill)], request, view, now)

    def _draw(self) -> int:
        """64 random bits."""
        self._state = (self._state + STEP) % 2**64
        return mixed(self._state)


class RoundRobin:
    """Each instance in turn."""

    def __init__(self):
        self._turn = 0

    def choose(self, request: RequestView, view: ClusterView, now: float) -> Dispatch:
        chosen = list(view.prefill)[self._turn % len(view.prefill)]
        self._turn += 1
        return dispatch_to(chosen, request, view, now)


class LoadBalancing:
    """The instance with the fewest requests outstanding (the load of FAST25 4.1); of equals, the first."""

    def choose(self, request: RequestView, view: ClusterView, now: float) -> Dispatch:
        return dispatch_to(min(view.prefill, key=view.outstanding), request, view, now)
