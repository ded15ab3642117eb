"""Conductor: the global scheduler (report 3 and 6).

Keeps the pool's metadata and a belief of every instance's load, asks the policy where each request goes, and follows
it to its end. Every request that arrives ends exactly once: completed, rejected or failed, with a reason. What
instances report corrects the belief.
"""

from dataclasses import dataclass, field

from mooncake_jax import metrics
from mooncake_jax.cache.pool import Block, WriteBehind
from mooncake_jax.request import COMPLETED, FAILED, REJECTED, Request, TokenLogprobs
from mooncake_jax.sched.messages import (
    Action,
    Arrived,
    BlocksPromoted,
    BlocksReplicated,
    BlocksWritten,
    Cancel,
    CopyLost,
    DecodingFailed,
    Expired,
    Interrupted,
    Later,
    Message,
    NodeLost,
    PrefillDone,
    PrefillFailed,
    PrefillStarted,
    Replication,
    Report,
    Send,
    SSDReported,
    StartPrefill,
    StoreOnSSD,
    Token,
    TokensDecoded,
)
from mooncake_jax.sched.policy import ClusterView, Dispatch, Policy, Reject


@dataclass(slots=True)
class _Open:
    """A request that has not ended, and what its user has received."""

    request: Request
    dispatch: int
    reused_tokens: int | None = None
    token_ids: list[int | None] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)


@dataclass(slots=True)
class _Attempt:
    """A dispatch, until its prefill has ended and its request too: who holds which pins."""

    request_id: str
    prefill: str
    decoding: str
    blocks: tuple[Block, ...]
    prefilling: bool = True
    promoting: tuple[Block, ...] = ()  # being read from the SSD
    replication: Replication | None = None  # being copied

    @property
    def settled(self) -> bool:
        """Whether nobody writes or reads its blocks any more."""
        return not self.prefilling and not self.promoting and self.replication is None


@dataclass(frozen=True, slots=True)
class _Write:
    """What is being written behind to a node's SSD."""

    node: str
    blocks: tuple[Block, ...]


class Conductor:
    """request_timeout: seconds from arrival after which a request fails, whatever keeps it."""

    def __init__(self, view: ClusterView, policy: Policy, request_timeout: float):
        self.view, self.policy, self.request_timeout = view, policy, request_timeout
        self.open: dict[str, _Open] = {}
        self.attempts: dict[int, _Attempt] = {}
        self.writes: dict[int, _Write] = {}
        self.dispatched = 0
        self.written_behind = 0

    def handle(self, message: Message, now: float) -> list[Action]:
        match message:
            case Arrived(request, None):
                return [*self._dispatch(request, now), Later(self.request_timeout, Expired(request.id))]
            case Arrived(request, invalid):
                return [Report(metrics.outcome(request, REJECTED, reason=invalid))]
            case SSDReported(node, stored):
                self.view.pool.restore(node, stored)
                return []
            case TokensDecoded(_, at, tokens):
                return [action for token in tokens for action in self._deliver(token, at)]
            case PrefillStarted():
                return self._prefill_started(message, now)
            case PrefillDone() | PrefillFailed():
                return self._prefill_ended(message)
            case BlocksReplicated():
                return self._replicated(message)
            case BlocksPromoted():
                return self._promoted(message)
            case BlocksWritten():
                return self._written(message)
            case DecodingFailed(dispatch, node, reason):
                return self._end(self._current(dispatch), FAILED, f"{node}: {reason}")
            case NodeLost(node):
                return self._node_lost(node, now)
            case Expired(request_id):
                reason = f"not finished within {self.request_timeout:g} s"
                return self._cancel(self.open.get(request_id)) + self._end(self.open.get(request_id), FAILED, reason)
            case Interrupted():
                return [
                    a for entry in list(self.open.values()) for a in self._end(entry, FAILED, "the run was interrupted")
                ]
        raise TypeError(f"Conductor cannot handle {type(message).__name__}")

    # --- dispatching

    def _dispatch(self, request: Request, now: float) -> list[Action]:
        decision = self.policy.choose(request, self.view, now)
        if isinstance(decision, Reject):
            self.open.pop(request.id, None)
            return [Report(metrics.outcome(request, REJECTED, reason=decision.reason))]
        self.dispatched += 1
        number, view = self.dispatched, self.view
        blocks = view.pool.reserve(decision.prefill, request.block_keys)
        attempt = _Attempt(request.id, decision.prefill, decision.decoding, blocks)
        attempt.promoting = view.pool.promote(decision.prefill, blocks)
        attempt.replication = self._replicate(attempt, decision)
        self.attempts[number] = attempt
        self.open[request.id] = _Open(request, number)
        view.decoding[decision.decoding].add(number, request.prompt_tokens)
        reused = self._expected_reuse(request, decision, attempt)
        view.prefill[decision.prefill].estimates[number] = view.cost.prefill(request.prompt_tokens, reused)
        start = StartPrefill(number, request, decision.decoding, blocks, attempt.promoting, attempt.replication)
        return [Send(decision.prefill, start)]

    def _replicate(self, attempt: _Attempt, decision: Dispatch) -> Replication | None:
        """Hot-spot migration: copy those blocks that the best match has in DRAM and that nobody is writing at the
        chosen instance yet.
        """
        pool, source = self.view.pool, decision.replicate_from
        if source is None:
            return None
        blocks = attempt.blocks[: decision.replicate_blocks]
        hot = blocks[: pool.in_dram(source, [block.key for block in blocks])]
        promoting = set(attempt.promoting)
        wanted = tuple(b for b in hot if pool.awaits_writer(attempt.prefill, b) and b not in promoting)
        if not wanted:
            return None
        return Replication(source, pool.reserve(source, [block.key for block in wanted]), wanted)

    def _expected_reuse(self, request: Request, decision: Dispatch, attempt: _Attempt) -> int:
        matched = self.view.pool.match(request.block_keys)[decision.prefill]
        if attempt.replication is not None:
            matched = max(matched, decision.replicate_blocks)
        return self.view.reusable_tokens(matched, request.prompt_tokens)

    # --- what instances report

    def _prefill_started(self, message: PrefillStarted, now: float) -> list[Action]:
        queue, entry = self.view.prefill.get(message.node), self._current(message.dispatch)
        if queue is not None and message.dispatch in queue.estimates and entry is not None:
            entry.reused_tokens = message.reused_tokens
            estimate = self.view.cost.prefill(entry.request.prompt_tokens, message.reused_tokens)
            queue.begin(message.dispatch, estimate, now)
        return []

    def _prefill_ended(self, message: PrefillDone | PrefillFailed) -> list[Action]:
        attempt = self.attempts.get(message.dispatch)
        if attempt is None or not attempt.prefilling:
            return []
        attempt.prefilling = False
        queue = self.view.prefill.get(message.node)
        if queue is not None:
            queue.end(message.dispatch)
        actions: list[Action] = []
        if isinstance(message, PrefillDone):
            self.view.pool.lose(message.node, message.lost)
            self.view.pool.land(message.node, message.stored)
            actions += self._write_behind(message.node, self.view.pool.write_behind(message.node, attempt.blocks))
        else:
            entry = self._current(message.dispatch)
            if entry is not None and self._alive(attempt.decoding):  # it may hold KVCache that will never be whole
                actions.append(Send(attempt.decoding, Cancel(message.dispatch)))
            actions += self._end(entry, FAILED, f"{message.node}: {message.reason}")
        self._settle(message.dispatch)
        return actions

    def _replicated(self, message: BlocksReplicated) -> list[Action]:
        """Replicas are found from now on; the source's blocks are free to leave."""
        attempt = self.attempts.get(message.dispatch)
        if attempt is not None and attempt.replication is not None:
            self.view.pool.land(message.node, message.blocks)
            self._release_source(attempt)
            self._settle(message.dispatch)
        return []

    def _promoted(self, message: BlocksPromoted) -> list[Action]:
        attempt = self.attempts.get(message.dispatch)
        if attempt is None or not attempt.promoting:
            return []
        write = self.view.pool.promoted(message.node, attempt.promoting, message.blocks)
        attempt.promoting = ()
        self._settle(message.dispatch)
        return self._write_behind(message.node, write)

    def _write_behind(self, node: str, write: WriteBehind) -> list[Action]:
        if not write.blocks and not write.dropped:
            return []
        self.written_behind += 1
        if write.blocks:
            self.writes[self.written_behind] = _Write(node, write.blocks)
        return [Send(node, StoreOnSSD(self.written_behind, write.blocks, write.parents, write.dropped))]

    def _written(self, message: BlocksWritten) -> list[Action]:
        write = self.writes.pop(message.number, None)
        if write is None:
            return []
        return self._write_behind(write.node, self.view.pool.written(write.node, write.blocks, message.keys))

    def _deliver(self, token: Token, at: float) -> list[Action]:
        entry = self._current(token.dispatch)
        if entry is None:
            return []
        entry.token_ids.append(token.token_id)
        entry.token_times.append(at)
        entry.logprobs.append(token.logprobs)
        self.view.decoding[self.attempts[token.dispatch].decoding].add(token.dispatch, 1)
        return self._end(entry, COMPLETED, None) if token.last else []

    # --- endings

    def _current(self, dispatch: int) -> _Open | None:
        """The open request that this dispatch still serves; None for a late message of an attempt that was given up."""
        attempt = self.attempts.get(dispatch)
        entry = self.open.get(attempt.request_id) if attempt is not None else None
        return entry if entry is not None and entry.dispatch == dispatch else None

    def _end(self, entry: _Open | None, status: str, reason: str | None) -> list[Action]:
        if entry is None:
            return []
        del self.open[entry.request.id]
        attempt = self.attempts[entry.dispatch]
        self._leave_decoding(entry.dispatch)
        self._settle(entry.dispatch)
        known = None not in entry.token_ids and entry.token_ids
        outcome = metrics.outcome(
            entry.request,
            status,
            reason=reason,
            token_times=entry.token_times,
            token_ids=entry.token_ids if known else None,
            reused_tokens=entry.reused_tokens,
            prefill_instance=attempt.prefill,
            decoding_instance=attempt.decoding,
            logprobs=entry.logprobs if entry.request.sampling.logprobs is not None else None,
        )
        return [Report(outcome)]

    def _leave_decoding(self, dispatch: int) -> None:
        load = self.view.decoding.get(self.attempts[dispatch].decoding)
        if load is not None:
            load.remove(dispatch)

    def _settle(self, dispatch: int) -> None:
        """Unpin its blocks once nothing writes them any more, and forget the attempt once its request has ended too."""
        attempt = self.attempts.get(dispatch)
        if attempt is None or not attempt.settled:
            return
        self.view.pool.release(attempt.prefill, attempt.blocks)
        attempt.blocks = ()
        if self._current(dispatch) is None:
            del self.attempts[dispatch]

    def _release_source(self, attempt: _Attempt) -> None:
        self.view.pool.release(attempt.replication.source, attempt.replication.source_blocks)
        attempt.replication = None

    def _cancel(self, entry: _Open | None) -> list[Action]:
        """Tell both instances of the request's dispatch that nobody waits for it."""
        if entry is None:
            return []
        attempt = self.attempts[entry.dispatch]
        return [Send(node, Cancel(entry.dispatch)) for node in (attempt.prefill, attempt.decoding) if self._alive(node)]

    def _alive(self, node: str) -> bool:
        return node in self.view.prefill or node in self.view.decoding

    def _node_lost(self, node: str, now: float) -> list[Action]:
        """Requests with no token yet are dispatched again; those that were decoding there fail."""
        self.view.prefill.pop(node, None)
        self.view.decoding.pop(node, None)
        self.view.pool.drop_node(node)
        self.writes = {number: write for number, write in self.writes.items() if write.node != node}
        actions: list[Action] = []
        for number, attempt in list(self.attempts.items()):
            copied_from = attempt.replication.source if attempt.replication is not None else None
            if copied_from == node and self._alive(attempt.prefill):  # its answer frees the blocks
                actions.append(Send(attempt.prefill, CopyLost(number, f"{node} is lost")))
            prefill_lost = node == attempt.prefill and attempt.prefilling
            if node == attempt.prefill:
                self._nothing_moves(attempt)
            entry = self._current(number)
            if entry is not None and (prefill_lost or node == attempt.decoding):
                actions += self._retry(number, entry, node, now)
            self._settle(number)
        return actions

    def _nothing_moves(self, attempt: _Attempt) -> None:
        """Its prefill instance is lost."""
        attempt.prefilling, attempt.promoting = False, ()
        if attempt.replication is not None:
            self._release_source(attempt)

    def _retry(self, number: int, entry: _Open, node: str, now: float) -> list[Action]:
        if entry.token_times:
            return self._end(entry, FAILED, f"{node} is lost")
        cancel = self._cancel(entry)
        self._leave_decoding(number)
        return [*cancel, *self._dispatch(entry.request, now)]

    def check(self) -> None:
        """Assert the invariants."""
        self.view.pool.check()
        for entry in self.open.values():
            assert entry.dispatch in self.attempts, f"{entry.request.id}: open without an attempt"
        for node, load in self.view.decoding.items():
            assert load.total == sum(load.contexts.values()) >= 0, f"{node}: context tokens do not add up"
        if not self.attempts and not self.writes:
            assert self.view.pool.pins() == 0, "pins are held for nobody"
            assert not any(queue.estimates or queue.begun for queue in self.view.prefill.values()), (
                "work is queued for nobody"
            )
