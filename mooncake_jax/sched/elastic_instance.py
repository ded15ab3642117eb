"""ElasticInstance: the local schedulers of an instance that prefills or decodes, as Conductor has it (elastic.py).

It has no role of its own and hears of none: what it is sent says what to do. Conductor gives it the other kind of work
only when the one is done, so that its device never does both.
"""

from collections.abc import Mapping

from mooncake_jax.sched.actions import Action
from mooncake_jax.sched.decoding import DecodingInstance
from mooncake_jax.sched.messages import (
    Cancel,
    DecodingFailed,
    KVCacheLoaded,
    KVCacheReceived,
    Message,
    PrefillFailed,
    PrefillInlined,
    StartPrefill,
    StepDone,
    StepFailed,
    StepsDone,
)
from mooncake_jax.sched.prefill import PrefillInstance
from mooncake_jax.sched.serve import Actor


class ElasticInstance:
    """Both under one name."""

    def __init__(self, prefill: PrefillInstance, decoding: DecodingInstance):
        self.prefill, self.decoding = prefill, decoding

    def handle(self, message: Message, now: float) -> list[Action]:
        match message:
            case Cancel():  # of either kind of work
                return [*self.prefill.handle(message, now), *self.decoding.handle(message, now)]
            case KVCacheReceived() | KVCacheLoaded() | StepDone() | StepsDone() | StepFailed() | DecodingFailed():
                return self.decoding.handle(message, now)
            case StartPrefill(decoding=self.prefill.name) | PrefillInlined():
                return self.decoding.handle(message, now)
            case PrefillFailed(dispatch) if dispatch == self.decoding.inlining:
                return self.decoding.handle(message, now)
        return self.prefill.handle(message, now)

    def check(self) -> None:
        """Assert the invariants."""
        self.prefill.check()
        self.decoding.check()
        running = len(self.prefill.running) + len(self.prefill.queue)
        decoding = len(self.decoding.batch) + len(self.decoding.loading) + len(self.decoding.waiting)
        assert not (running and decoding), f"{self.prefill.name}: {running} prefills beside {decoding} decoding"


def together(prefill: Mapping[str, PrefillInstance], decoding: Mapping[str, DecodingInstance]) -> dict[str, Actor]:
    """One actor for each instance, by name: those that are in both do both."""
    elastic = {node: ElasticInstance(prefill[node], decoding[node]) for node in prefill if node in decoding}
    return {**prefill, **decoding, **elastic}
