"""A coupled instance's endings beside those of a run, its memory under random use, and its actions from a record."""

import json
import random
from collections import OrderedDict

import pytest
from simulated import BLOCK, COST, make_config, make_request, random_requests

from mooncake_jax.cluster.record import Recorded, decode, digest
from mooncake_jax.sched.actions import DropKVCache, PrefillPart, RunIteration, RunStep, Send
from mooncake_jax.sched.batching import DecodingLimits
from mooncake_jax.sched.coupled import COUPLED_MODES, CoupledInstance
from mooncake_jax.sched.device_pages import DevicePages
from mooncake_jax.sched.messages import (
    CONDUCTOR,
    Cancel,
    DecodingFailed,
    PrefillDone,
    PrefillFailed,
    PrefillStarted,
    StartPrefill,
    StepDone,
    StepFailed,
    TokensDecoded,
)
from mooncake_jax.simulate.actors import make_actors
from mooncake_jax.simulate.run import simulate

A, B = make_request("a", 40, output=8), make_request("b", 20, output=8)


class Harness:
    """An instance whose invariants are asserted after each message."""

    def __init__(self, mode="plain", pages=64):
        self.actor, self.now = CoupledInstance("coupled0", DecodingLimits(4, pages, BLOCK), COUPLED_MODES[mode]), 0.0

    def handle(self, message):
        self.now += 1.0
        actions = self.actor.handle(message, self.now)
        self.actor.check()
        return actions

    def start(self, dispatch, request):
        return self.handle(StartPrefill(dispatch, request, "coupled0", ()))


def told(message):
    return Send(CONDUCTOR, message)


def part(dispatch, request):
    return PrefillPart(dispatch, request, 0, request.prompt_tokens)


def test_a_request_from_its_prompt_to_its_second_token():
    harness = Harness()
    started = told(PrefillStarted(1, "coupled0", 0))
    assert harness.start(1, A) == [started, RunIteration((part(1, A),), ())]
    done = told(PrefillDone(1, "coupled0", 0, 1.0, ()))
    first, *rest = harness.handle(StepDone(((1, 7),), 1.0))
    assert first == done and rest[-1] == RunStep((1,))
    assert [action.message.tokens[0].token_id for action in rest[:-1]] == [7], "the prompt's last part gives a token"
    assert type(harness.handle(StepDone(((1, 8),), 1.0))[0].message) is TokensDecoded


def test_cancelled_wherever_it_is():
    harness = Harness()
    harness.start(1, A)
    harness.start(2, B)
    assert harness.handle(Cancel(2)) == [told(PrefillFailed(2, "coupled0", "cancelled"))], "while it waits"
    harness.start(3, B)
    assert harness.handle(Cancel(1)) == [DropKVCache(1), told(PrefillFailed(1, "coupled0", "cancelled"))]
    after = harness.handle(StepDone(((1, None),), 1.0))  # of an iteration that was for nobody
    assert after == [told(PrefillStarted(3, "coupled0", 0)), RunIteration((part(3, B),), ())]
    harness.handle(StepDone(((3, None),), 1.0))
    assert harness.handle(Cancel(3)) == [DropKVCache(3), told(DecodingFailed(3, "coupled0", "cancelled"))]
    assert harness.handle(Cancel(3)) == [], "late"
    assert harness.handle(StepDone(((3, None),), 1.0)) == []
    assert harness.actor.pages.used == 0


def test_a_failed_iteration_fails_all_that_are_in_and_those_that_wait_go_on():
    harness = Harness("chunked_prefill")
    harness.start(1, A)
    harness.handle(StepDone(((1, None),), 1.0))
    harness.start(2, B)
    harness.handle(StepDone(((1, None),), 1.0))  # of the step under way: the next one is of both
    harness.start(3, B)
    failed = harness.handle(StepFailed("out of memory"))
    assert failed[:4] == [
        DropKVCache(2),
        told(PrefillFailed(2, "coupled0", "out of memory")),
        DropKVCache(1),
        told(DecodingFailed(1, "coupled0", "out of memory")),
    ]
    assert failed[-1] == RunIteration((part(3, B),), ())


def test_what_will_never_fit_keeps_nobody_waiting():
    harness = Harness(pages=2)
    assert harness.start(1, A) == [told(PrefillFailed(1, "coupled0", "needs 3 pages, of which there are 2"))]
    assert RunIteration((part(2, B),), ()) in harness.start(2, B)


class PlainPages:
    """The same, read from the docstring: blocks in order of their use."""

    def __init__(self, count):
        self.count, self.blocks, self.inside = count, OrderedDict(), {}

    @property
    def used(self):
        return len({key for keys, _ in self.inside.values() for key in keys}) + sum(
            own for _, own in self.inside.values()
        )

    def reusable(self, keys):
        return next((place for place, key in enumerate(keys) if not self.blocks.get(key)), len(keys))

    def take(self, dispatch, keys, own):
        inside = {key for held, _ in self.inside.values() for key in held}
        if self.used + own + len(set(keys) - inside) > self.count:
            return False
        self.inside[dispatch] = keys, own
        self._use(keys, {key: False for key in keys})
        inside |= set(keys)
        idle = [key for key in self.blocks if key not in inside]
        for key in idle[: max(0, self.used + len(idle) - self.count)]:
            del self.blocks[key]
        return True

    def _use(self, keys, new):
        for key in reversed(keys):
            self.blocks.setdefault(key, new.get(key))
            self.blocks.move_to_end(key)

    def landed(self, dispatch):
        self.blocks.update(dict.fromkeys(self.inside[dispatch][0], True))

    def release(self, dispatch):
        keys, _ = self.inside.pop(dispatch)
        inside = {key for held, _ in self.inside.values() for key in held}
        self._use(keys, {})
        for key in keys:
            if key not in inside and not self.blocks[key]:
                del self.blocks[key]


@pytest.mark.parametrize("seed", range(4))
def test_memory_under_random_use(seed):
    rng = random.Random(seed)
    pages, plain, inside = DevicePages(40, BLOCK, reuses=True), PlainPages(40), {}
    for dispatch in range(1500):
        if inside and rng.random() < 0.5:
            gone = rng.choice(sorted(inside))
            request = inside.pop(gone)
            if rng.random() < 0.8:
                pages.landed(gone, request)
                plain.landed(gone)
            pages.release(gone)
            plain.release(gone)
        shared = rng.randrange(10)
        request = make_request(
            dispatch, BLOCK * (shared + rng.randrange(3)) + 5, 0.0, 1, f"c{rng.randrange(4)}", shared
        )
        keys, own = request.block_keys, rng.randrange(3)
        assert pages.reusable(request) == BLOCK * plain.reusable(keys)
        taken = pages.take(dispatch, request, len(keys) + own)
        assert taken == plain.take(dispatch, keys, own)
        if taken:
            inside[dispatch] = request
        assert pages.used == plain.used
        pages.check()
    assert len(inside) > 2 and any(plain.blocks.values())


@pytest.mark.parametrize("mode", COUPLED_MODES)
def test_a_recorded_run_handled_again_gives_the_same_actions(mode):
    lines = []
    config = make_config(coupled=2, coupled_mode=mode, policy="random", request_timeout=2.0, token_budget=200)

    def host(node, actor):
        return Recorded(node, actor, lambda line: lines.append(json.loads(line)))

    simulate(config, COST, random_requests(2, 60), host=host)
    fresh = make_actors(config, COST)
    for line in lines:
        actions = fresh[line["node"]].handle(decode(line["message"]), line["now"])
        assert digest(actions) == line["actions"]
    assert len(lines) > 300
