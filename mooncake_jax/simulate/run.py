"""A run of the simulated cluster, from its requests to their outcomes."""

import gc
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mooncake_jax.cache.pool import TIERS, Cause, KVCachePool
from mooncake_jax.request import Outcome, Request
from mooncake_jax.sched.actions import Action
from mooncake_jax.sched.cost import CostModel
from mooncake_jax.sched.messages import CONDUCTOR, Message
from mooncake_jax.sched.mfu import PrefillWork
from mooncake_jax.sched.scheduler import NO_TIME_LIMIT, TimeLimit
from mooncake_jax.sched.serve import Actor, serve
from mooncake_jax.simulate.actors import make_actors
from mooncake_jax.simulate.cluster import SimulatedCluster
from mooncake_jax.simulate.config import SimulationConfig
from mooncake_jax.simulate.conservation import Asked, check_conserved
from mooncake_jax.simulate.waiting import what_waits

_CHECK_ALL = 1000  # events between two checks of what is large

Hosted = Callable[[str, Actor], Actor]


class Stuck(Exception):
    """Requests are left that nothing will end; says which, and what they wait for."""


@dataclass
class Run:
    """duration_s: from the start to the last ending. prefill_work: what each prefill instance has computed;
    inlined_prefills: how many decoding instances have. hardware: what it has done, roles: what changes of role there
    were (sched/elastic.py), None where they are fixed, faults: what the policy and the admission did wrong, and how
    often; ready for JSON, but for prefill_work.
    """

    duration_s: float
    outcomes: list[Outcome] = field(default_factory=list)
    prefill_work: dict[str, PrefillWork] = field(default_factory=dict)
    inlined_prefills: int = 0
    hardware: dict[str, Any] = field(default_factory=dict)
    pool: dict[str, Any] = field(default_factory=dict)
    roles: dict[str, Any] | None = None
    faults: dict[str, int] = field(default_factory=dict)


def simulate(
    config: SimulationConfig,
    cost: CostModel,
    requests: Sequence[Request],
    *,
    believed: CostModel | None = None,
    ended: Callable[[Outcome], None] = lambda outcome: None,
    host: Hosted = lambda node, actor: actor,
    check: bool = False,
    time_limit: TimeLimit = NO_TIME_LIMIT,
) -> Run:
    """Serve these requests. cost: what the hardware of a node takes; believed: what Conductor believes of it, None: the
    same. ended: told of every outcome. host: puts something around an actor, such as a record of what it handles.
    check: assert all invariants all along, and pickle every message, which takes many times as long.
    time_limit: what each of Conductor's decisions runs in (scheduler.py), such as cluster/time_limit.py makes.

    Raises UsageError where a policy or an admission cannot be loaded, and Stuck.
    """
    run = Run(0.0)
    actors = make_actors(config, believed or cost, time_limit)
    conductor = actors[CONDUCTOR]

    def add(outcome: Outcome) -> None:
        run.outcomes.append(outcome)
        ended(outcome)

    in_order = sorted(requests, key=lambda request: request.arrival)
    invalid = {r.id: reason for r in in_order if (reason := why_invalid(r, config)) is not None}
    judges = conductor.scheduler.judges_prefilled
    cluster = SimulatedCluster(config, cost, in_order, invalid, add, judges)
    hosted = {node: host(node, actor) for node, actor in actors.items()}
    asked = Asked()
    if check:
        hosted = {node: _Checked(hosted[node], actor, cluster, asked, config) for node, actor in actors.items()}
    with uncollected():
        serve(hosted, cluster)
    if cluster.unended:
        raise Stuck(what_waits(cluster.unended, actors))
    if check:
        _check_end(actors)
        check_conserved(config, cost, in_order, run.outcomes, asked, cluster)
    run.duration_s = cluster.last_ended
    run.prefill_work = dict(conductor.prefill_work)
    run.inlined_prefills = conductor.inlined_prefills
    run.hardware = _hardware(cluster, sum(work.prefills for work in run.prefill_work.values()))
    run.pool = _pool(conductor.view.pool)
    run.roles = conductor.roles.summary() if conductor.roles is not None else None
    run.faults = dict(conductor.scheduler.faults.most_common())
    return run


def why_invalid(request: Request, config: SimulationConfig) -> str | None:
    """Why this request cannot be served at all, None if it can."""
    if config.drop_over is not None and request.prompt_tokens > config.drop_over:
        return f"the prompt has more than {config.drop_over} tokens"
    if request.prompt_tokens == 0:
        return "the prompt is empty"
    if request.output_length < 1:
        return f"its output is {request.output_length} tokens: it must be at least 1"
    held = config.decoding_pages * config.block_size
    pages = -(-(request.prompt_tokens + request.output_length) // config.block_size)
    if pages > config.decoding_pages:
        tokens = request.prompt_tokens + request.output_length
        return f"its {tokens} tokens of KVCache exceed the {held} that a decoding instance holds"
    return None


@contextmanager
def uncollected() -> Iterator[None]:
    """A run makes millions of objects, and no cycles of them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Checked:
    """An actor whose messages are pickled, and whose invariants are asserted after each. asked: adds up its actions."""

    def __init__(self, hosted: Actor, actor: Any, cluster: SimulatedCluster, asked: Asked, config: SimulationConfig):
        self._hosted, self._actor, self._cluster, self._asked, self._config = hosted, actor, cluster, asked, config
        self._events = 0
        self._now = 0.0

    def handle(self, message: Message, now: float) -> list[Action]:
        assert now >= self._now, f"time runs back from {self._now} to {now}"
        self._now = now
        given = pickle.loads(pickle.dumps(message))
        actions = self._hosted.handle(given, now)
        assert given == message, f"an actor has changed its message: {message}"
        self._asked.add(actions, self._config)
        self._events += 1
        large = hasattr(self._actor, "view")
        if not large or self._events % _CHECK_ALL == 1:
            self._actor.check()
        self._cluster.check()
        return pickle.loads(pickle.dumps(actions))


def _check_end(actors: Mapping[str, Any]) -> None:
    """Nothing is left with them."""
    for actor in actors.values():
        actor.check()
    assert not actors[CONDUCTOR].attempts, "a dispatch is not over"
    assert actors[CONDUCTOR].view.pool.pins() == 0, "blocks are held for nobody"


def _hardware(cluster: SimulatedCluster, prefills: int) -> dict[str, Any]:
    """prefills: how many have been done."""
    prefill, decoding = cluster.prefill.items(), cluster.decoding.items()
    computed = {node: hardware.group.computed for node, hardware in prefill}
    computed |= {node: hardware.computed for node, hardware in cluster.coupled.items()}
    cores = {} if cluster.cores is None else {"core_s": cluster.cores.busy}
    return {
        "prefill_busy_s": {node: hardware.group.busy for node, hardware in prefill},
        "prefill_compute_s": computed,
        "prefill_compute_s_mean": math.fsum(computed.values()) / prefills if prefills else None,
        "decoding_busy_s": {node: hardware.busy for node, hardware in decoding},
        "decoding_inlined_s": {node: hardware.inlined for node, hardware in decoding},
        "decoding_steps": {node: hardware.steps for node, hardware in decoding},
        "decoding_tokens": {node: hardware.tokens for node, hardware in decoding},
        "loaded_bytes": {node: hardware.loaded for node, hardware in decoding},
        "sent_bytes": dict(sorted(cluster.network.sent.items())),
    } | cores


def _pool(pool: KVCachePool) -> dict[str, Any]:
    """As in the summary of a replay."""
    changes = {tier: {cause: pool.counts[tier, cause] for cause in Cause if pool.counts[tier, cause]} for tier in TIERS}
    blocks = {node: dict(zip(TIERS, counts)) for node, counts in pool.blocks().items()}
    return {"blocks": blocks, "changes": changes, "unwritten": pool.unwritten}
