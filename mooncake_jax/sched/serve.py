"""The loop that joins actors and a cluster, the same in virtual time and on MPI ranks."""

from typing import Protocol

from mooncake_jax.sched.actions import Action
from mooncake_jax.sched.messages import Message


class Actor(Protocol):
    """Conductor or an instance: plain state, no clock, no threads, no I/O, no unseeded randomness."""

    def handle(self, message: Message, now: float) -> list[Action]: ...


class Cluster(Protocol):
    """Whatever carries out actions and knows the time: ranks under MPI, or a heap of events."""

    def next_event(self) -> tuple[float, str, Message] | None:
        """(now, node, message) of the next event; None when the run is over."""

    def perform(self, node: str, action: Action, now: float) -> None: ...


def serve(actors: dict[str, Actor], cluster: Cluster) -> None:
    while (event := cluster.next_event()) is not None:
        now, node, message = event
        for action in actors[node].handle(message, now):
            cluster.perform(node, action, now)
