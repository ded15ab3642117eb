"""Scheduler: how Conductor asks a policy and an admission, which may be anybody's code (report 6 and 7).

What they do wrong fails one request, with their name in the reason, and nothing else: raising, whatever it is,
answering with something other than a decision or with an instance that is not there (answers.py), changing the view
(shown_view.py), taking too long. They are shown requests without output lengths. How long is too long says the time
limit that is given: actors have no clock.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias, TypeVar

from mooncake_jax.request import Request
from mooncake_jax.sched.admission import Admission
from mooncake_jax.sched.answers import WrongAnswer, checked_choice, checked_verdict
from mooncake_jax.sched.decisions import ENDINGS, Dispatch, Fault, Reject
from mooncake_jax.sched.inline import inline_if_better
from mooncake_jax.sched.policies import Policy
from mooncake_jax.sched.shown_view import first_changed, read_only, state
from mooncake_jax.sched.texts import one_line, told
from mooncake_jax.sched.view import ClusterView, RequestView

T = TypeVar("T")
TimeLimit: TypeAlias = AbstractContextManager  # one object, entered for every decision
NO_TIME_LIMIT: TimeLimit = nullcontext()

MOST_SECONDS = 1.0  # that a decision may take
OURS = __name__.partition(".")[0] + "."


class TooLong(BaseException):
    """Raised inside a decision by its time limit. No Exception, so that no policy catches it by accident."""


class NotTheUsers(BaseException):
    """Raised by a time limit instead of a KeyboardInterrupt that comes of no Ctrl-C."""


class Scheduler:
    """policy and admission with the names they came by; time_limit: what every call of them runs in, or two of
    ours together, and which raises TooLong there after MOST_SECONDS. Without one a KeyboardInterrupt is taken for the
    user's. longest_inlined: prompts of so many tokens may be prefilled where they are decoded (inline.py), 0 for none.
    """

    def __init__(
        self,
        policy: Policy,
        admission: Admission,
        policy_name: str = "",
        admission_name: str = "",
        time_limit: TimeLimit = NO_TIME_LIMIT,
        longest_inlined: int = 0,
    ):
        self.policy, self.admission = policy, admission
        # Whether the admission looks at a request again once its prefill has ended.
        self.judges_prefilled = getattr(type(admission), "on_prefilled", None) is not Admission.on_prefilled
        self._policy_name = f"policy {policy_name or type(policy).__name__}"
        self._admission_name = f"admission {admission_name or type(admission).__name__}"
        self._asked = ""  # the name of who is being asked
        self._both_ours = _is_ours(policy) and _is_ours(admission)
        self._time_limit, self._longest_inlined = time_limit, longest_inlined
        self.faults: Counter[str] = Counter()  # what went wrong, those that failed no request too

    def dispatch(self, request: Request, view: ClusterView, now: float) -> Dispatch | Reject | Fault:
        """Where a request goes that has arrived."""
        if not (view.prefill and view.decoding):
            return Fault(f"no {'decoding' if view.prefill else 'prefill'} instance is alive")
        asked = RequestView.of(request)
        if self._both_ours:  # neither is watched: one time limit is enough, and spares half of what guarding takes
            return self._guarded(self._policy_name, self._decide, asked, view, now)
        chosen = self._ask(
            self._policy_name,
            self.policy,
            view,
            now,
            lambda seen: checked_choice(self.policy.choose(asked, seen, now), view),
        )
        if isinstance(chosen, ENDINGS):
            return chosen
        if asked.prompt_tokens <= self._longest_inlined:
            chosen = inline_if_better(asked, chosen, view)
        verdict = self._judge(view, now, lambda seen: self.admission.on_arrival(asked, chosen, seen, now))
        return chosen if verdict is None else verdict

    def _decide(self, asked: RequestView, view: ClusterView, now: float) -> Dispatch | Reject | Fault:
        chosen = checked_choice(self.policy.choose(asked, view, now), view)
        if isinstance(chosen, ENDINGS):
            return chosen
        if asked.prompt_tokens <= self._longest_inlined:
            chosen = inline_if_better(asked, chosen, view)
        self._asked = self._admission_name
        verdict = checked_verdict(self.admission.on_arrival(asked, chosen, view, now))
        return chosen if verdict is None else verdict

    def prefilled(self, request: Request, decoding: str, view: ClusterView, now: float) -> Reject | Fault | None:
        """Whether a request whose prefill has ended, which the view knows, is not to be decoded after all."""
        if not self.judges_prefilled:
            return None
        asked = RequestView.of(request)
        return self._judge(view, now, lambda seen: self.admission.on_prefilled(asked, decoding, seen, now))

    def completed(self, request: Request, output_tokens: int, decoding_seconds: float) -> None:
        """Tell what became of a request."""
        asked = RequestView.of(request)
        self._guarded(self._admission_name, self.admission.on_completed, asked, output_tokens, decoding_seconds)

    def _judge(self, view: ClusterView, now: float, ask: Callable[[ClusterView], object]) -> Reject | Fault | None:
        return self._ask(self._admission_name, self.admission, view, now, lambda seen: checked_verdict(ask(seen)))

    def _ask(
        self, name: str, asked: Policy | Admission, view: ClusterView, now: float, decide: Callable[[ClusterView], T]
    ) -> T | Fault:
        """What it decides by the view, in which anybody else's code is watched."""
        if _is_ours(asked):
            return self._guarded(name, decide, view)
        try:
            before, seen = state(view, now), read_only(view)
            answer = self._guarded(name, decide, seen)
            changed = first_changed(view, before, state(view, now))
        except Exception as error:
            return self._fault(f"{name} left a view of the cluster that cannot be read: {told(error)}")
        return answer if changed is None else self._fault(f"{name} changed {changed} in the view, which it only reads")

    def _guarded(self, name: str, decide: Callable[..., T], *arguments: object) -> T | Fault:
        """Whatever goes wrong in there is a fault, with this name or that of who is asked then; but for Ctrl-C."""
        self._asked = name
        try:
            with self._time_limit:
                wrong, answer = _tried(decide, arguments)
        except TooLong:
            wrong = f"took longer than {MOST_SECONDS:g} s"
        except NotTheUsers:
            wrong = "raised KeyboardInterrupt"
        except KeyboardInterrupt:
            raise
        except BaseException:  # telling what it was has raised, too
            wrong = "raised what cannot be shown"
        return answer if wrong is None else self._fault(f"{self._asked} {wrong}")

    def _fault(self, reason: str) -> Fault:
        fault = Fault(one_line(reason))
        self.faults[fault.reason] += 1
        return fault


def _is_ours(asked: Policy | Admission) -> bool:
    return type(asked).__module__.startswith(OURS)


def _tried(decide: Callable[..., T], arguments: tuple) -> tuple[str | None, T | None]:
    """What went wrong, and else what was decided. The time limit holds for the telling too: that is anybody's code."""
    try:
        return None, decide(*arguments)
    except WrongAnswer as wrong:
        return f"{wrong}", None
    except (TooLong, KeyboardInterrupt):
        raise
    except BaseException as error:
        return f"raised {told(error)}", None
