"""What a scheduler sees: a request without its output length, and Conductor's belief of the cluster (report 6).

Schedulers read it and change nothing. Conductor tells it what happens, in the terms of dispatches: a dispatch number
is one attempt to serve a request. Knows nothing of policies.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mooncake_jax.cache.pool import KVCachePool
from mooncake_jax.records import record
from mooncake_jax.request import SLO, Request
from mooncake_jax.sched.cost import CostModel
from mooncake_jax.sched.decisions import Dispatch
from mooncake_jax.sched.decoding_load import DecodingLoad
from mooncake_jax.sched.pace import Pace
from mooncake_jax.sched.prefill_queue import PrefillQueue


class RequestView(NamedTuple):
    """What a scheduler may know of a request: not how long its output will be, nor the most that its user takes."""

    id: str
    arrival: float
    prompt_tokens: int
    prompt_ids: tuple[int, ...]
    block_keys: tuple[bytes, ...]
    cache_salt: str
    priority: int
    ttft_slo: float | None
    tbt_slo: float | None

    @classmethod
    def of(cls, r: Request) -> "RequestView":
        return cls(
            r.id,
            r.arrival,
            r.prompt_tokens,
            r.prompt_ids,
            r.block_keys,
            r.cache_salt,
            r.priority,
            r.ttft_slo,
            r.tbt_slo,
        )


@record
class _Copy:
    """KVCache on its way from one prefill instance to another."""

    source: str
    estimated: float  # seconds
    since: float


@dataclass(slots=True)
class ClusterView:
    """What Conductor knows when it decides. slo: of requests that name none; kv_tokens: tokens of KVCache that each
    decoding instance holds in device memory, None for no limit; transfer_pace: how many times longer copies between
    prefill instances take than the cost model says; coupled: whether instances are coupled: each is in prefill
    and in decoding, and decodes what it prefills. With elastic roles (elastic.py), moved: the queues of prefill
    instances that decode now, kept for what they have learned; draining: loads of those that are to prefill again and
    get no new requests.
    """

    prefill: dict[str, PrefillQueue]
    decoding: dict[str, DecodingLoad]
    pool: KVCachePool
    cost: CostModel
    slo: SLO
    block_size: int
    bytes_per_token: int
    kv_tokens: int | None = None
    transfer_pace: Pace = field(default_factory=Pace)
    coupled: bool = False
    moved: dict[str, PrefillQueue] = field(default_factory=dict)
    draining: dict[str, DecodingLoad] = field(default_factory=dict)
    _copies: dict[int, _Copy] = field(default_factory=dict)  # by dispatch number
    _sending: Counter[str] = field(default_factory=Counter)  # how many of them leave each instance

    # --- for schedulers

    def slo_of(self, request: RequestView | Request) -> SLO:
        """Its own where it names one."""
        if request.ttft_slo is None and request.tbt_slo is None:
            return self.slo
        return SLO(
            self.slo.ttft if request.ttft_slo is None else request.ttft_slo,
            self.slo.tbt if request.tbt_slo is None else request.tbt_slo,
        )

    def reusable_tokens(self, blocks: int, prompt_tokens: int) -> int:
        """Tokens that so many matching blocks spare; the last prompt token is always computed."""
        return min(blocks * self.block_size, prompt_tokens - 1)

    def outstanding(self, prefill: str) -> int:
        """Requests that this prefill instance has not done with; a coupled one decodes them too."""
        return len(self.decoding[prefill].requests) if self.coupled else len(self.prefill[prefill])

    def load(self, node: str) -> DecodingLoad | None:
        """Of an instance that decodes, whether it gets new requests or is to prefill again; None of any other."""
        load = self.decoding.get(node)
        return load if load is not None else self.draining.get(node)

    def transfer(self, tokens: int, source: str) -> float:
        """T_transfer: seconds to copy the KVCache of so many tokens from this prefill instance to another, beside what
        it sends to others already.
        """
        return self.transfer_pace.factor * self._transfer(tokens, source)

    def _transfer(self, tokens: int, source: str) -> float:
        return self.cost.transfer(tokens * self.bytes_per_token, 1 + self._sending[source])

    # --- for Conductor

    def dispatched(
        self, number: int, request: RequestView | Request, dispatch: Dispatch, reused_tokens: int, now: float
    ) -> None:
        """A request goes where `dispatch` says, and is expected to reuse so many tokens."""
        load = self.decoding[dispatch.decoding]
        load.add(number, request.prompt_tokens, now + dispatch.ttft, self.slo_of(request).tbt)
        if dispatch.inlined:
            load.inline(number, self.cost.prefill_compute(request.prompt_tokens, 0))
            return
        latency = self.cost.prefill(request.prompt_tokens, reused_tokens)
        self.prefill[dispatch.prefill].add(number, request.prompt_tokens - reused_tokens, latency)

    def prefill_started(
        self, number: int, prefill: str, decoding: str, prompt_tokens: int, reused_tokens: int, now: float
    ) -> None:
        queue, load = self.prefill.get(prefill), self.load(decoding)
        if load is not None and number in load.inlining:
            load.expect(number, now + load.inline_pace.factor * load.inlining[number])
        if queue is None:
            return
        latency = self.cost.prefill(prompt_tokens, reused_tokens)
        queue.begin(number, prompt_tokens - reused_tokens, latency, now)
        if load is not None:
            load.expect(number, now + queue.pace.factor * latency)

    def prefill_done(self, number: int, prefill: str, decoding: str, now: float) -> None:
        if (queue := self.prefill.get(prefill)) is not None:
            queue.end(number, now)
        if (load := self.load(decoding)) is not None:
            load.prefilled(number, now)

    def inlined(self, number: int, decoding: str, seconds: float) -> None:
        """Its prefill took the decoding instance so long."""
        if (load := self.load(decoding)) is not None:
            load.inlined(number, seconds)

    def prefill_failed(self, number: int, prefill: str) -> None:
        """It failed or was cancelled; what else becomes of its request is told apart."""
        if (queue := self.prefill.get(prefill)) is not None:
            queue.drop(number)

    def copy_started(self, number: int, source: str, tokens: int, now: float) -> None:
        """The KVCache of so many tokens is being copied from this prefill instance, for a dispatch."""
        self._copies[number] = _Copy(source, self._transfer(tokens, source), now)
        self._sending[source] += 1

    def copied(self, number: int, now: float) -> None:
        """All of it has arrived, which teaches how long copies take."""
        if (copy := self._copies.get(number)) is not None:
            self.transfer_pace.learn(copy.estimated, now - copy.since)
            self.copy_lost(number)

    def copy_lost(self, number: int) -> None:
        """It has not arrived, or not all of it."""
        if (copy := self._copies.pop(number, None)) is not None:
            self._sending[copy.source] -= 1
            if not self._sending[copy.source]:
                del self._sending[copy.source]

    def tokens(self, numbers: Sequence[int], decoding: str, at: float, count: int = 1) -> None:
        """These requests got a token of output each, or so many from then on."""
        if (load := self.load(decoding)) is not None:
            load.tokens(numbers, at, count)

    def decoding_seconds(self, number: int, decoding: str, at: float) -> float:
        """From its first token until `at`."""
        load = self.load(decoding)
        first = load.requests[number].first_token if load is not None and number in load.requests else None
        return 0.0 if first is None else at - first

    def left(self, number: int, decoding: str) -> None:
        """A request is no longer at this decoding instance, or on its way there."""
        if (load := self.load(decoding)) is not None:
            load.remove(number)

    def lost(self, node: str) -> None:
        """An instance is gone."""
        for instances in (self.prefill, self.decoding, self.moved, self.draining):
            instances.pop(node, None)
        self.pool.drop_node(node)

    def alive(self, node: str) -> bool:
        return node in self.prefill or node in self.decoding or node in self.draining

    # --- roles

    def decode(self, node: str) -> None:
        """A prefill instance with nothing to do decodes from now on."""
        self.moved[node] = self.prefill.pop(node)
        self.decoding[node] = DecodingLoad()

    def drain(self, node: str) -> None:
        """One that has moved is to prefill again."""
        self.draining[node] = self.decoding.pop(node)

    def decode_on(self, node: str) -> None:
        """One that was to prefill again is to decode after all."""
        self.decoding[node] = self.draining.pop(node)

    def prefill_again(self, node: str) -> None:
        """It holds no request any more."""
        del self.draining[node]
        self.prefill[node] = self.moved.pop(node)

    @property
    def idle(self) -> bool:
        """Whether nobody has anything to do."""
        loads = (load.requests for load in (*self.decoding.values(), *self.draining.values()))
        return not (self._copies or any(map(len, self.prefill.values())) or any(loads))

    def check(self) -> None:
        """Assert the invariants."""
        for queue in self.prefill.values():
            queue.check()
        for load in (*self.decoding.values(), *self.draining.values()):
            load.check()
        roles = Counter((*self.prefill, *self.decoding, *self.draining))
        assert self.coupled or set(roles.values()) <= {1}, f"an instance has two roles: {roles}"
        assert self.draining.keys() <= self.moved.keys() <= self.decoding.keys() | self.draining.keys(), (
            "who has moved?"
        )
        assert not any(map(len, self.moved.values())), "an instance that decodes has prefills to do"
        assert self._sending == Counter(copy.source for copy in self._copies.values()), "copies are counted wrongly"
