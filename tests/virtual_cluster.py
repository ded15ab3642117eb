"""Test harness: the real actors in virtual time, with a cost model as the hardware and faults on demand."""

import dataclasses
import heapq
import itertools
import pickle

from mooncake_jax.cache.keys import block_keys, root_key
from mooncake_jax.cache.pool import KVCachePool
from mooncake_jax.request import SLO, Request
from mooncake_jax.sched.actions import (
    AbandonCopy,
    DropKVCache,
    FetchBlocks,
    InlinePrefill,
    Later,
    LoadKVCache,
    PromoteBlocks,
    Report,
    RunPrefill,
    RunStep,
    Send,
    WriteBlocks,
)
from mooncake_jax.sched.admission import SLOCheck
from mooncake_jax.sched.conductor import Conductor
from mooncake_jax.sched.cost import PolynomialCost
from mooncake_jax.sched.decoding import DecodingInstance, DecodingLimits
from mooncake_jax.sched.decoding_load import DecodingLoad
from mooncake_jax.sched.kvcache_centric import KVCacheCentric
from mooncake_jax.sched.messages import (
    CONDUCTOR,
    Arrived,
    BlocksPromoted,
    BlocksReplicated,
    BlocksWritten,
    KVCacheLoaded,
    KVCacheReceived,
    PrefillDone,
    PrefillFailed,
    PrefillInlined,
    PrefillStarted,
    SSDReported,
    StepDone,
)
from mooncake_jax.sched.prefill import PrefillInstance
from mooncake_jax.sched.prefill_queue import PrefillQueue
from mooncake_jax.sched.scheduler import Scheduler
from mooncake_jax.sched.serve import serve
from mooncake_jax.sched.view import ClusterView

BLOCK = 16
BYTES_PER_TOKEN = 1000
COST = PolynomialCost((0.01, 1e-3, 1e-7), (0.01, 1e-3, 1e-6), (1e-3, 1e-8))
ROOT = root_key(b"test", BLOCK)


def make_request(name, prompt_ids, arrival=0.0, output_length=4):
    ids = tuple(prompt_ids)
    return Request(str(name), arrival, len(ids), output_length, ids, block_keys(ids, BLOCK, ROOT))


def make_actors(
    prefill=2,
    decode=1,
    slots=64,
    ssd=0,
    slo=SLO(),
    threshold=2.0,
    limits=DecodingLimits(4, 64, BLOCK),
    timeout=1e6,
    stages=1,
    scheduler=None,
    decoding_cost=None,
):
    prefills = [f"prefill{i}" for i in range(prefill)]
    decodes = [f"decode{i}" for i in range(decode)]
    view = ClusterView(
        {node: PrefillQueue() for node in prefills},
        {node: DecodingLoad() for node in decodes},
        KVCachePool(dict.fromkeys(prefills, slots), ssd=dict.fromkeys(prefills, ssd)),
        COST,
        slo,
        BLOCK,
        BYTES_PER_TOKEN,
    )
    actors = {CONDUCTOR: Conductor(view, scheduler or Scheduler(KVCacheCentric(threshold), SLOCheck()), timeout)}
    actors |= {node: PrefillInstance(node, stages) for node in prefills}
    limits = dataclasses.replace(limits, tbt_slo=slo.tbt)
    return actors | {node: DecodingInstance(node, limits, decoding_cost) for node in decodes}


class VirtualCluster:
    """failing: ids of requests whose prefill fails; rotting: of those that find a block damaged as they load it, once;
    damaged: keys that no SSD can read or write; ssd: what lies there,
    by node, and is kept. Checks every actor's invariants before each event.
    """

    def __init__(self, actors, requests, failing=(), damaged=(), rotting=(), ssd=None):
        self.actors, self.failing, self.damaged = actors, failing, damaged
        self.rotting = set(rotting)
        self.ssd = {} if ssd is None else ssd
        self.heap, self.ties = [], itertools.count()
        self.outcomes, self.log, self.dead, self.held = {}, [], set(), {}
        for node, stored in self.ssd.items():
            self.push(0.0, CONDUCTOR, SSDReported(node, tuple(stored.items())))
        for request in requests:
            self.push(request.arrival, CONDUCTOR, Arrived(request))

    def push(self, at, node, message):
        heapq.heappush(self.heap, (at, next(self.ties), node, pickle.dumps(message)))

    def next_event(self):
        for actor in self.actors.values():
            actor.check()
        while self.heap:
            now, _, node, message = heapq.heappop(self.heap)
            if node not in self.dead:
                event = (now, node, pickle.loads(message))
                self.log.append(event)
                return event
        return None

    def perform(self, node, action, now):
        match action:
            case Send(to, message):
                self.push(now, to, message)
            case Later(seconds, message):
                self.push(now + seconds, node, message)
            case Report(outcome):
                assert outcome.id not in self.outcomes, f"{outcome.id} ended twice"
                self.outcomes[outcome.id] = outcome
            case RunPrefill():
                self._prefill(node, action, now)
            case FetchBlocks(dispatch, replication):
                target = replication.target_blocks
                seconds = COST.transfer(len(target) * BLOCK * BYTES_PER_TOKEN)
                self.push(now + seconds, node, BlocksReplicated(dispatch, node, target))
            case PromoteBlocks(dispatch, blocks):
                stored = self.ssd[node]
                read = tuple(b for b in blocks if b.key in stored and b.key not in self.damaged)
                reason = None if len(read) == len(blocks) else "damaged"
                self.push(now + 0.01 * len(blocks), node, BlocksPromoted(dispatch, node, read, reason))
            case WriteBlocks(order):
                self._write(node, order, now)
            case AbandonCopy(dispatch, reason):
                self.push(now, node, BlocksReplicated(dispatch, node, (), reason))
            case LoadKVCache(dispatch):
                self.push(now + 0.001, node, KVCacheLoaded(dispatch))
            case RunStep(batch):
                self.push(now + COST.step(len(batch), 0), node, StepDone(tuple((d, 7) for d in batch), 0.0))
            case InlinePrefill(dispatch, request):
                self.held.setdefault(node, {})[dispatch] = request
                seconds = COST.prefill_compute(request.prompt_tokens, 0)
                failed = PrefillFailed(dispatch, node, "made to fail")
                done = failed if request.id in self.failing else PrefillInlined(dispatch, seconds, 5)
                self.push(now + seconds, node, done)
            case DropKVCache(dispatch):
                self.held.get(node, {}).pop(dispatch, None)
            case _:
                raise TypeError(action)

    def _write(self, node, order, now):
        stored = self.ssd.setdefault(node, {})
        for key in order.dropped:
            stored.pop(key, None)
        written = {b.key: p for b, p in zip(order.blocks, order.parents) if b.key not in self.damaged}
        stored.update(written)
        if order.blocks:
            self.push(now + 0.02 * len(order.blocks), node, BlocksWritten(order.number, node, tuple(written)))

    def _prefill(self, node, run, now):
        request = run.request
        reused = min(run.reuse * BLOCK, request.prompt_tokens - 1)
        seconds = COST.prefill(request.prompt_tokens, reused)
        self.push(now, node, PrefillStarted(run.dispatch, node, reused))
        self.held.setdefault(run.decoding, {})[run.dispatch] = request  # its first pieces arrive while it is computed
        if request.id in self.failing:
            self.push(now + seconds, node, PrefillFailed(run.dispatch, node, "made to fail"))
            return
        if request.id in self.rotting:
            self.rotting.remove(request.id)
            self.push(now + seconds, node, PrefillFailed(run.dispatch, node, "a block was damaged", again=True))
            return
        stored = tuple(run.blocks[i] for i in run.missing)
        self.push(now + seconds, node, PrefillDone(run.dispatch, node, reused, seconds, stored))
        self.push(now + seconds, run.decoding, KVCacheReceived(run.dispatch, request, 5))


def run(actors, requests, **faults):
    cluster = VirtualCluster(actors, requests, **faults)
    serve(actors, cluster)
    assert actors[CONDUCTOR].view.pool.pins() == 0
    assert not actors[CONDUCTOR].attempts and not actors[CONDUCTOR].reservations.writing
    pool = actors[CONDUCTOR].view.pool
    for node, stored in cluster.ssd.items():
        assert {key for key in stored if node in pool.holders(key)} == stored.keys(), "what lies there is found"
        assert len(stored) == pool.blocks()[node][1], "and no more is"
    return cluster
