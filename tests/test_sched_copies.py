"""Copies between prefill instances as Conductor follows them: what they make it expect of the next request."""

from cluster_states import NOW, request, view_of

from mooncake_jax.sched.actions import Send
from mooncake_jax.sched.admission import SLOCheck
from mooncake_jax.sched.conductor import Conductor
from mooncake_jax.sched.kvcache_centric import KVCacheCentric
from mooncake_jax.sched.messages import Arrived, BlocksReplicated
from mooncake_jax.sched.scheduler import Scheduler

COMPUTED = 1 / 64  # seconds of the one token that is left, once all blocks are there
COPIED = 0.25  # of four blocks, by the cost model


class Arriving:
    """Conductor of a cluster where prefill0 has eight blocks and a long queue, and the others are idle."""

    def __init__(self):
        self.view = view_of([8, 0, 0], [[50.0]])
        self.conductor = Conductor(self.view, Scheduler(KVCacheCentric(1.5), SLOCheck()), 1e6)

    def arrives(self, name, blocks, now):
        """Where it goes, and its predicted TTFT in seconds."""
        actions = self.conductor.handle(Arrived(request(blocks, 1, name)), now)
        [(node, start)] = [(action.to, action.message) for action in actions if isinstance(action, Send)]
        assert start.replicate.source == "prefill0"
        return start, node, self.view.decoding["decode0"].requests[start.dispatch].ready - now


def test_a_copy_under_way_slows_the_next_one_and_its_blocks_count_as_reused():
    cluster = Arriving()
    assert cluster.arrives("a", 4, NOW)[1:] == ("prefill1", COPIED + COMPUTED)
    assert cluster.view.prefill["prefill1"].seconds(NOW) == COMPUTED, "T_queue of whoever comes after it"
    assert cluster.arrives("b", 4, NOW)[1:] == ("prefill2", 2 * COPIED + COMPUTED)


def test_how_long_a_copy_took_is_expected_of_the_next_one():
    cluster = Arriving()
    first, node, _ = cluster.arrives("a", 4, NOW)
    late = NOW + 4 * COPIED
    cluster.conductor.handle(BlocksReplicated(first.dispatch, node, first.replicate.target_blocks), late)
    pace = cluster.view.transfer_pace.factor
    assert pace == (0.9 * COPIED + 4 * COPIED) / (1.9 * COPIED)
    start, node, ttft = cluster.arrives("b", 8, late)
    assert (node, len(start.replicate.target_blocks)) == ("prefill1", 4), "it has the first four now"
    assert abs(ttft - (pace * COPIED + COMPUTED + COMPUTED)) < 1e-12, "the copy, a's prefill, its own"
