"""Conductor: the global scheduler (report 3 and 6).

Keeps the pool's metadata and a belief of every instance's load, asks the scheduler where each request goes, and follows
it to its end. Every request that arrives ends exactly once: completed, rejected or failed, with a reason. What
instances report corrects the belief.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from mooncake_jax import metrics
from mooncake_jax.records import record
from mooncake_jax.request import COMPLETED, FAILED, REJECTED, Request, TokenLogprobs
from mooncake_jax.sched.actions import Action, Later, Report, Send
from mooncake_jax.sched.decisions import Dispatch, Fault, Reject
from mooncake_jax.sched.elastic import ElasticRoles
from mooncake_jax.sched.messages import (
    Arrived,
    BlocksPromoted,
    BlocksReplicated,
    BlocksWritten,
    Cancel,
    CopyLost,
    DecodingFailed,
    DecodingRejected,
    Expired,
    Interrupted,
    Message,
    NodeLost,
    PrefillDone,
    PrefillFailed,
    PrefillStarted,
    ReviewRoles,
    SSDReported,
    StartPrefill,
    StepsDecoded,
    Token,
    TokensDecoded,
)
from mooncake_jax.sched.mfu import PrefillWork
from mooncake_jax.sched.reservations import Reservations
from mooncake_jax.sched.scheduler import Scheduler
from mooncake_jax.sched.view import ClusterView


@dataclass(slots=True)
class _Open:
    """A request that has not ended, and what its user has received."""

    request: Request
    dispatch: int
    reused_tokens: int | None = None
    token_ids: list[int | None] = field(default_factory=list)
    token_times: metrics.TokenTimes = field(default_factory=metrics.TokenTimes)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)


@record
class _Attempt:
    """A dispatch, until its request has ended and nothing of it moves any more (reservations.py)."""

    request_id: str
    prompt_tokens: int
    prefill: str
    decoding: str
    inlined: bool


class Conductor:
    """request_timeout: seconds from arrival after which a request fails, whatever keeps it. prefill_work: what each
    prefill instance has computed so far; inlined_prefills: how many decoding instances have. roles: what moves
    instances between prefill and decoding, None: nothing.
    """

    def __init__(
        self, view: ClusterView, scheduler: Scheduler, request_timeout: float, roles: ElasticRoles | None = None
    ):
        self.view, self.scheduler, self.request_timeout, self.roles = view, scheduler, request_timeout, roles
        self.open: dict[str, _Open] = {}
        self.serving: dict[int, _Open] = {}  # the same, by the dispatch that serves them
        self.attempts: dict[int, _Attempt] = {}
        self.reservations = Reservations(view.pool)
        self.prefill_work = defaultdict(PrefillWork, {node: PrefillWork() for node in view.prefill})
        self.dispatched = self.inlined_prefills = 0

    def handle(self, message: Message, now: float) -> list[Action]:
        match message:
            case StepsDecoded():  # first, as a simulation has more of them than of all others
                return self._deliver_steps(message)
            case Arrived(request, None):
                looks = self.roles.arrived(now) if self.roles is not None else []
                return [*self._dispatch(request, now), Later(self.request_timeout, Expired(request.id)), *looks]
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
                return self._prefill_ended(message, now)
            case BlocksReplicated():
                return self._replicated(message, now)
            case BlocksPromoted():
                actions = self.reservations.promoted(message)
                self._forget_if_over(message.dispatch)
                return actions
            case BlocksWritten():
                return self.reservations.written(message)
            case DecodingFailed(dispatch, node, reason):
                return self._end(self._current(dispatch), FAILED, f"{node}: {reason}")
            case DecodingRejected(dispatch, _, reason, estimate, limit):
                return self._end(self._current(dispatch), REJECTED, reason, estimate, limit)
            case NodeLost(node):
                return self._node_lost(node, now)
            case Expired(request_id):
                reason = f"not finished within {self.request_timeout:g} s"
                return self._cancel(self.open.get(request_id)) + self._end(self.open.get(request_id), FAILED, reason)
            case ReviewRoles():
                return self.roles.due(now, bool(self.open))
            case Interrupted():
                return [
                    a for entry in list(self.open.values()) for a in self._end(entry, FAILED, "the run was interrupted")
                ]
        raise TypeError(f"Conductor cannot handle {type(message).__name__}")

    # --- dispatching

    def _dispatch(self, request: Request, now: float) -> list[Action]:
        decision = self.scheduler.dispatch(request, self.view, now)
        if (before := self.open.get(request.id)) is not None:  # it was dispatched before, in vain
            del self.serving[before.dispatch]
        if type(decision) is not Dispatch:
            self.open.pop(request.id, None)
            status, reason, estimate, limit = _ending(decision)
            return [Report(metrics.outcome(request, status, reason=reason, estimate=estimate, limit=limit))]
        self.dispatched += 1
        number, view = self.dispatched, self.view
        reservation = self.reservations.begin(number, request, decision)
        matched = 0 if decision.inlined else view.pool.matched(decision.prefill, request.block_keys)
        if reservation.replication is not None:
            matched = max(matched, decision.replicate_blocks)
            tokens = len(reservation.replication.target_blocks) * view.block_size
            view.copy_started(number, reservation.replication.source, tokens, now)
        goes = decision.prefill, decision.decoding, decision.inlined
        self.attempts[number] = _Attempt(request.id, request.prompt_tokens, *goes)
        self.open[request.id] = self.serving[number] = _Open(request, number)
        reused = view.reusable_tokens(matched, request.prompt_tokens)
        view.dispatched(number, request, decision, reused, now)
        blocks, promote, replicate = reservation.blocks, reservation.promoting, reservation.replication
        start = StartPrefill(number, request, decision.decoding, blocks, promote, replicate)
        return [Send(decision.prefill, start)]

    # --- what instances report

    def _prefill_started(self, message: PrefillStarted, now: float) -> list[Action]:
        attempt, entry = self.attempts.get(message.dispatch), self._current(message.dispatch)
        if entry is not None:
            entry.reused_tokens = message.reused_tokens
        if attempt is not None:
            tokens, reused = attempt.prompt_tokens, message.reused_tokens
            self.view.prefill_started(message.dispatch, message.node, attempt.decoding, tokens, reused, now)
        return []

    def _prefill_ended(self, message: PrefillDone | PrefillFailed, now: float) -> list[Action]:
        if not self.reservations.prefilling(message.dispatch):
            return []
        attempt = self.attempts[message.dispatch]
        actions: list[Action] = [*self.reservations.prefill_ended(message)]
        if isinstance(message, PrefillDone):
            if attempt.inlined:
                self.inlined_prefills += 1
                self.view.inlined(message.dispatch, message.node, message.seconds)
            else:
                self.prefill_work[message.node].add(attempt.prompt_tokens, message.reused_tokens)
            self.view.prefill_done(message.dispatch, message.node, attempt.decoding, now)
            actions += self._judge_prefilled(message.dispatch, attempt, now)
        else:
            self.view.prefill_failed(message.dispatch, message.node)
            entry = self._current(message.dispatch)
            if entry is not None and self.view.alive(attempt.decoding):  # it may hold KVCache that will never be whole
                actions.append(Send(attempt.decoding, Cancel(message.dispatch)))
            if entry is not None and message.again:
                self._leave_decoding(message.dispatch)
                actions += self._dispatch(entry.request, now)
            else:
                actions += self._end(entry, FAILED, f"{message.node}: {message.reason}")
        self._forget_if_over(message.dispatch)
        return actions

    def _judge_prefilled(self, dispatch: int, attempt: _Attempt, now: float) -> list[Action]:
        """Whether it is decoded at all; a rejection now wastes its prefill (report 7.2)."""
        entry = self._current(dispatch)
        if entry is None or self.view.load(attempt.decoding) is None:
            return []
        verdict = self.scheduler.prefilled(entry.request, attempt.decoding, self.view, now)
        if verdict is None:
            return []
        return [Send(attempt.decoding, Cancel(dispatch)), *self._end(entry, *_ending(verdict))]

    def _replicated(self, message: BlocksReplicated, now: float) -> list[Action]:
        if self.reservations.replicated(message):
            if message.reason is None:
                self.view.copied(message.dispatch, now)
            self.view.copy_lost(message.dispatch)
            self._forget_if_over(message.dispatch)
        return []

    def _deliver(self, token: Token, at: float) -> list[Action]:
        entry = self._current(token.dispatch)
        if entry is None:
            return []
        entry.token_ids.append(token.token_id)
        entry.token_times.add((at,), ())
        entry.logprobs.append(token.logprobs)
        decoding = self.attempts[token.dispatch].decoding
        self.view.tokens([token.dispatch], decoding, at)
        return self._complete(entry, at) if token.last else []

    def _deliver_steps(self, steps: StepsDecoded) -> list[Action]:
        """What _deliver() would do for each of their tokens."""
        times, gaps = steps.times, metrics.gaps_of(steps.times)
        serving = self.serving.get
        for dispatch in steps.dispatches:
            if (entry := serving(dispatch)) is not None:
                entry.token_times.add(times, gaps)
        self.view.tokens(steps.dispatches, steps.node, times[0], len(times))
        ended = filter(None, map(serving, steps.ended))
        return [action for entry in ended for action in self._complete(entry, times[-1])]

    def _complete(self, entry: _Open, at: float) -> list[Action]:
        """Its last token came at that time."""
        seconds = self.view.decoding_seconds(entry.dispatch, self.attempts[entry.dispatch].decoding, at)
        self.scheduler.completed(entry.request, len(entry.token_times), seconds)
        return self._end(entry, COMPLETED, None)

    # --- endings

    def _current(self, dispatch: int) -> _Open | None:
        """The open request that this dispatch still serves; None for a late message of an attempt that was given up."""
        return self.serving.get(dispatch)

    def _end(
        self,
        entry: _Open | None,
        status: str,
        reason: str | None,
        estimate: float | None = None,
        limit: float | None = None,
    ) -> list[Action]:
        if entry is None:
            return []
        del self.open[entry.request.id], self.serving[entry.dispatch]
        attempt = self.attempts[entry.dispatch]
        self._leave_decoding(entry.dispatch)
        self._forget_if_over(entry.dispatch)
        known = None not in entry.token_ids and entry.token_ids
        outcome = metrics.outcome(
            entry.request,
            status,
            reason=reason,
            estimate=estimate,
            limit=limit,
            token_times=entry.token_times,
            token_ids=entry.token_ids if known else None,
            reused_tokens=entry.reused_tokens,
            prefill_instance=attempt.prefill,
            decoding_instance=attempt.decoding,
            logprobs=entry.logprobs if entry.request.sampling.logprobs is not None else None,
        )
        return [Report(outcome)]

    def _leave_decoding(self, dispatch: int) -> None:
        self.view.left(dispatch, self.attempts[dispatch].decoding)

    def _forget_if_over(self, dispatch: int) -> None:
        if dispatch not in self.reservations and self._current(dispatch) is None:
            self.attempts.pop(dispatch, None)

    def _cancel(self, entry: _Open | None) -> list[Action]:
        """Tell both instances of the request's dispatch that nobody waits for it."""
        if entry is None:
            return []
        attempt = self.attempts[entry.dispatch]
        nodes = dict.fromkeys((attempt.prefill, attempt.decoding))  # it may be one
        return [Send(node, Cancel(entry.dispatch)) for node in nodes if self.view.alive(node)]

    def _node_lost(self, node: str, now: float) -> list[Action]:
        """Requests with no token yet are dispatched again; those that were decoding there fail."""
        self.view.lost(node)
        actions: list[Action] = []
        for number in self.reservations.copied_from(node):
            if self.view.alive(self.attempts[number].prefill):  # its answer frees the blocks
                actions.append(Send(self.attempts[number].prefill, CopyLost(number, f"{node} is lost")))
        prefilling = set(self.reservations.node_lost(node))
        for number, attempt in list(self.attempts.items()):
            if attempt.prefill == node:
                self.view.copy_lost(number)
            entry = self._current(number)
            if entry is not None and (number in prefilling or node == attempt.decoding):
                actions += self._retry(number, entry, node, now)
            self._forget_if_over(number)
        return actions

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
        by_dispatch = {entry.dispatch: entry for entry in self.open.values()}
        assert self.serving == by_dispatch, "a request is served by another dispatch"
        self.view.check()
        self.reservations.check()
        if self.roles is not None:
            self.roles.check()
        if not self.attempts:
            assert self.view.idle, "work is queued for nobody"


def _ending(verdict: Reject | Fault) -> tuple[str, str, float | None, float | None]:
    """Status, reason, estimate and limit."""
    if isinstance(verdict, Fault):
        return FAILED, verdict.reason, None, None
    return REJECTED, verdict.reason, verdict.estimate, verdict.limit
