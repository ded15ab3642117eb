"""Elastic roles: when loads have diverged, who moves, what moved instances still lend, and their losses."""

import dataclasses
import random

import pytest
from cluster_states import NOW, request, view_of
from virtual_cluster import BLOCK, VirtualCluster, make_actors, make_request

from mooncake_jax.request import COMPLETED, FAILED, REJECTED, SLO
from mooncake_jax.sched.actions import DropKVCache, Later, RunPrefill, RunStep, Send
from mooncake_jax.sched.admission import Baseline
from mooncake_jax.sched.decisions import Dispatch
from mooncake_jax.sched.decoding import DecodingInstance, DecodingLimits
from mooncake_jax.sched.elastic import DECODING, PREFILL, DivergingLoads, ElasticRoles, Move, RoleChange
from mooncake_jax.sched.elastic_instance import ElasticInstance, together
from mooncake_jax.sched.kvcache_centric import KVCacheCentric
from mooncake_jax.sched.messages import CONDUCTOR, Cancel, KVCacheLoaded, KVCacheReceived, NodeLost, StartPrefill
from mooncake_jax.sched.prefill import PrefillInstance
from mooncake_jax.sched.scheduler import Scheduler
from mooncake_jax.sched.serve import serve
from mooncake_jax.sched.view import RequestView

SLOS = SLO(ttft=4.0, tbt=0.125)
BUSY = ((64,) * 3,)  # 7/64 s a step


def reviewed(policy, view, times):
    return [policy.review(view, time) for time in times]


# --- when


def test_decoding_gets_an_instance_once_it_has_been_short_of_them_for_so_long():
    policy, view = DivergingLoads(10.0), view_of((4, 2, 3), decoding=BUSY, slo=SLOS)
    move = Move("prefill1", DECODING)  # which keeps the fewest blocks
    assert reviewed(policy, view, (NOW, NOW + 9.9, NOW + 10.0)) == [None, None, move]
    assert reviewed(policy, view, (NOW + 10.1, NOW + 19.9, NOW + 20.0)) == [None, None, move], "the next takes as long"


def test_a_break_begins_it_anew():
    policy, view = DivergingLoads(10.0), view_of((0, 0), decoding=BUSY, slo=SLOS)
    calm = view_of((0, 0), slo=SLOS)
    assert reviewed(policy, view, (NOW, NOW + 9.0)) == [None, None]
    assert policy.review(calm, NOW + 9.5) is None
    assert reviewed(policy, view, (NOW + 11.0, NOW + 20.9)) == [None, None]
    assert policy.review(view, NOW + 21.0) is not None


@pytest.mark.parametrize(
    ("waiting", "decoding", "what"),
    [
        ((), ((64,),), "a decoding pool that is not half as loaded as it may be"),
        (((3.0,), (3.0,)), BUSY, "both pools are busy"),
        ((), ((),), "nobody is busy"),
    ],
)
def test_nothing_moves_while(waiting, decoding, what):
    policy, view = DivergingLoads(1.0), view_of((0, 0), waiting, decoding, slo=SLOS)
    assert reviewed(policy, view, (NOW, NOW + 100.0)) == [None, None], what


@pytest.mark.parametrize(("waiting", "moves"), [(3.5, False), (3.5 - 2**-10, True)])
def test_loads_diverge_above_twice_the_mean_of_the_other_pool(waiting, moves):
    """Decoding is at 7/8 of its SLO; of the two prefill instances one has work for so many of its 4 s."""
    view = view_of((0, 0), ((waiting,), ()), BUSY, slo=SLOS)
    assert (diverged(view) == Move("prefill1", DECODING)) == moves


def test_requests_still_in_prefill_are_no_decoding_load():
    view = view_of((0, 0), decoding=BUSY, slo=SLOS)
    for assigned in view.decoding["decode0"].requests.values():
        assigned.prefilled = False
    policy = DivergingLoads(1.0)
    assert reviewed(policy, view, (NOW, NOW + 100.0)) == [None, None]


# --- who


def diverged(view):
    policy = DivergingLoads(1.0)
    policy.review(view, NOW)
    return policy.review(view, NOW + 1.0)


def test_only_an_idle_prefill_instance_moves_and_never_the_last():
    assert diverged(view_of((0, 0), ((0.5,), ()), BUSY, slo=SLOS)) == Move("prefill1", DECODING)
    assert diverged(view_of((0, 0), ((0.5,), (0.5,)), BUSY, slo=SLOS)) is None
    assert diverged(view_of((0,), decoding=BUSY, slo=SLOS)) is None


def test_of_those_that_moved_the_one_with_the_fewest_requests_goes_back_and_never_the_last():
    view = view_of((0, 0, 0, 0), ((), (), (), (9.0,)), slo=SLOS)
    for node in ("prefill0", "prefill1", "prefill2"):
        view.decode(node)
    view.decoding["prefill0"].add(7, 1, NOW)
    view.decoding["prefill2"].add(8, 1, NOW)
    assert diverged(view) == Move("prefill1", PREFILL)
    view.drain("prefill1")
    assert diverged(view) == Move("prefill0", PREFILL)
    view.lost("decode0")
    view.lost("prefill0")
    assert diverged(view) is None, "somebody must decode"


def test_one_on_its_way_back_decodes_on_rather_than_another_moves():
    view = view_of((0, 0, 0), decoding=BUSY, slo=SLOS)
    view.decode("prefill2")
    view.drain("prefill2")
    assert diverged(view) == Move("prefill2", DECODING)


def test_a_pool_without_any_instance_is_short_of_them():
    view = view_of((0, 0), slo=SLOS)
    view.lost("decode0")
    assert diverged(view) == Move("prefill0", DECODING)


# --- the view and what reads it


def test_blocks_of_a_moved_instance_can_be_copied_from_it():
    view = view_of((8, 0))
    view.decode("prefill0")
    asked = request(8, tail=1)
    chosen = Scheduler(KVCacheCentric(), make_actors()[CONDUCTOR].scheduler.admission).dispatch(asked, view, NOW)
    assert (chosen.prefill, chosen.replicate_from, chosen.replicate_blocks) == ("prefill1", "prefill0", 8)


class Told:
    """A role policy that does what it is told, at the first look from then on."""

    review_s = 0.05

    def __init__(self, *moves):
        self.moves = sorted(moves, key=lambda move: move[0])

    def review(self, view, now):
        return self.moves.pop(0)[1] if self.moves and self.moves[0][0] <= now else None


LIMITS = DecodingLimits(4, 200, BLOCK)


def elastic(policy, **options):
    actors = make_actors(limits=LIMITS, **options)
    conductor = actors[CONDUCTOR]
    conductor.roles = ElasticRoles(policy, conductor.view)
    prefill = {node: actors[node] for node in conductor.view.prefill}
    return actors | together(prefill, {node: DecodingInstance(node, LIMITS) for node in prefill})


class Losing(VirtualCluster):
    """Nodes that NodeLost names are gone from then on. Dropped KVCache is not received, as on real hardware."""

    def __init__(self, *args):
        super().__init__(*args)
        self.dropped = set()

    def perform(self, node, action, now):
        super().perform(node, action, now)
        if isinstance(action, DropKVCache):
            self.dropped.add((node, action.dispatch))

    def next_event(self):
        event = super().next_event()
        while event and isinstance(event[2], KVCacheReceived) and (event[1], event[2].dispatch) in self.dropped:
            event = super().next_event()
        if event is not None and isinstance(event[2], NodeLost):
            self.dead.add(event[2].node)
            self.actors = {node: actor for node, actor in self.actors.items() if node != event[2].node}
        return event


def served(actors, requests, lost=()):
    """The outcomes, with all invariants asserted at each event and at the end."""
    cluster = Losing(actors, requests)
    for at, node in lost:
        cluster.push(at, CONDUCTOR, NodeLost(node))
    serve(dict(actors), cluster)
    conductor = actors[CONDUCTOR]
    assert conductor.view.pool.pins() == 0 and not conductor.attempts and conductor.view.idle
    assert len(cluster.outcomes) == len(requests)
    return cluster.outcomes


def tokens(seed, length):
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


def spread(count, every=0.2, output=200):
    return [make_request(i, tokens(i, 60), arrival=every * i, output_length=output) for i in range(count)]


def test_a_moved_instance_decodes_and_goes_back_once_it_is_empty():
    policy = Told((1.0, Move("prefill1", DECODING)), (2.5, Move("prefill1", PREFILL)))
    actors = elastic(policy)
    outcomes = served(actors, spread(40))
    by_decoder = {node: {o.arrival_s for o in outcomes.values() if o.decoding_instance == node} for node in actors}
    assert {o.status for o in outcomes.values()} == {COMPLETED} and by_decoder["prefill1"]
    assert all(1.0 <= at < 2.7 for at in by_decoder["prefill1"]), "no new ones once it is to go back"
    there, back = actors[CONDUCTOR].roles.changes
    last = max(o.arrival_s + o.ttft_s for o in outcomes.values() if o.decoding_instance == "prefill1")
    assert (there.node, there.role, back.node, back.role) == ("prefill1", DECODING, "prefill1", PREFILL)
    assert 1.0 <= there.at_s < 1.1 and back.at_s > last
    prefilled = {o.arrival_s for o in outcomes.values() if o.prefill_instance == "prefill1"}
    assert not any(there.at_s <= at < back.at_s for at in prefilled)


def test_hot_blocks_are_copied_from_an_instance_that_decodes():
    prefix = tokens(50, 480)
    requests = [make_request("seed", prefix), make_request("hot", prefix + tokens(51, 30), arrival=10.0)]
    actors = elastic(Told((5.0, Move("prefill0", DECODING))), slots=1000)
    outcomes = served(actors, requests)
    assert outcomes["seed"].prefill_instance == "prefill0" and outcomes["hot"].prefill_instance == "prefill1"
    assert outcomes["hot"].reused_tokens == 480


@pytest.mark.parametrize("draining", [False, True])
def test_requests_on_a_lost_instance_that_had_moved_fail_and_the_others_go_on(draining):
    moves = [(1.0, Move("prefill1", DECODING))] + [(2.0, Move("prefill1", PREFILL))] * draining
    actors = elastic(Told(*moves))
    outcomes = served(actors, spread(20, output=400), lost=[(2.3, "prefill1")])
    failed = {o.id: o for o in outcomes.values() if o.status == FAILED}
    assert failed and {o.reason for o in failed.values()} == {"prefill1 is lost"}
    assert all(o.decoding_instance == "prefill1" for o in failed.values())
    assert all(o.status == COMPLETED for o in outcomes.values() if o.id not in failed)
    assert not actors[CONDUCTOR].view.alive("prefill1")


def test_a_late_check_is_made_at_an_instance_that_is_to_go_back_as_at_others():
    """Its prefill ends while the instance that it was to decode at is drained."""
    busy = make_request("busy", tokens(1, 60), output_length=400)
    late = dataclasses.replace(make_request("late", tokens(2, 500), arrival=1.5), tbt_slo=1e-9)
    policy = Told((1.0, Move("prefill1", DECODING)), (1.8, Move("prefill1", PREFILL)))
    outcomes = served(elastic(policy, scheduler=Scheduler(KVCacheCentric(), Baseline())), [busy, late])
    rejected = outcomes["late"]
    assert (rejected.status, rejected.decoding_instance) == (REJECTED, "prefill1")
    assert (rejected.reason, rejected.limit) == ("predicted TBT is above the SLO", 1e-9)
    assert outcomes["busy"].status == COMPLETED


def test_a_run_ends_though_looks_are_repeated():
    actors = elastic(Told())
    cluster = VirtualCluster(actors, spread(2))
    serve(actors, cluster)
    assert not cluster.heap and len(cluster.outcomes) == 2


class Restless:
    """Moves anybody who may, all the time."""

    review_s = 0.03

    def __init__(self, seed):
        self.rng = random.Random(seed)

    def review(self, view, now):
        idle = [node for node, queue in view.prefill.items() if not len(queue)] if len(view.prefill) > 1 else []
        moves = [Move(node, DECODING) for node in (*idle, *view.draining)]
        if len(view.decoding) > 1:
            moves += [Move(node, PREFILL) for node in view.moved if node in view.decoding]
        return self.rng.choice(moves) if moves and self.rng.random() < 0.3 else None


@pytest.mark.parametrize("seed", range(8))
def test_random_moves_and_losses_end_every_request_exactly_once(seed):
    rng = random.Random(seed)
    prefixes = [tokens(100 + i, rng.randrange(16, 400)) for i in range(4)]
    requests, at = [], 0.0
    for i in range(60):
        at += rng.expovariate(8)
        prompt = rng.choice(prefixes) + tokens(1000 + i, rng.randrange(1, 120))
        requests.append(make_request(i, prompt, arrival=at, output_length=rng.randrange(1, 60)))
    options = {"prefill": 4, "decode": 2, "slots": rng.choice([16, 64, 500]), "ssd": rng.choice([0, 40])}
    lost = [(rng.uniform(1, 6), node) for node in rng.sample(["prefill0", "prefill1", "decode0"], seed % 3)]
    actors = elastic(Restless(seed), **options)
    served(actors, requests, lost)
    roles = actors[CONDUCTOR].roles.summary()
    assert roles["to_decoding"] > 2 and roles["to_prefill"] > 0
    assert len(roles["changes"]) == roles["to_decoding"] + roles["to_prefill"]
    assert ElasticRoles(Told(), actors[CONDUCTOR].view).summary() == {"to_decoding": 0, "to_prefill": 0, "changes": []}


# --- invariants and the actor


def test_broken_invariants_are_found():
    view = view_of((0, 0), slo=SLOS)
    roles = ElasticRoles(Told((0.0, Move("prefill0", DECODING)), (0.0, Move("prefill0", PREFILL))), view)
    [look] = roles.arrived(NOW)
    assert isinstance(look, Later) and look.seconds == Told.review_s
    assert roles.changes == [RoleChange(NOW, "prefill0", DECODING)]
    view.decoding["prefill0"].add(3, 10, NOW)
    assert roles.due(NOW, open_requests=False) == []
    roles.check()
    view.check()
    view.draining["prefill0"].add(4, 10, NOW)
    with pytest.raises(AssertionError, match="prefill0 is to go back, and got new requests"):
        roles.check()
    view.decoding["prefill0"] = view.draining["prefill0"]
    with pytest.raises(AssertionError, match="an instance has two roles"):
        view.check()


def test_nobody_is_dispatched_to_one_that_is_to_go_back():
    view = view_of((0, 0), slo=SLOS)
    view.decode("prefill0")
    view.drain("prefill0")
    fields = RequestView.of(dataclasses.replace(request(), id="new"))
    with pytest.raises(KeyError):
        view.dispatched(1, fields, Dispatch("prefill1", "prefill0", 1.0, 0.1), 0, NOW)


def test_the_instance_passes_each_message_to_whom_it_is_for():
    actor = ElasticInstance(PrefillInstance("prefill0"), DecodingInstance("prefill0", LIMITS))
    prompt = make_request("a", tokens(1, 40))
    [load] = actor.handle(KVCacheReceived(1, prompt, 5), 0.0)
    assert load.dispatch == 1
    _, step = actor.handle(KVCacheLoaded(1), 0.0)
    assert step == RunStep((1,))
    assert actor.handle(Cancel(1), 0.0) == [DropKVCache(1)]
    [run] = actor.handle(StartPrefill(2, prompt, "decode0", ()), 0.0)
    assert isinstance(run, RunPrefill)
    assert actor.handle(StartPrefill(3, prompt, "decode0", ()), 0.0) == []
    failed, dropped = actor.handle(Cancel(3), 0.0)
    assert isinstance(failed, Send) and failed.message.reason == "cancelled" and dropped == DropKVCache(3)
    with pytest.raises(TypeError, match="prefill0 cannot handle NodeLost"):
        actor.handle(NodeLost("x"), 0.0)
    actor.check()
