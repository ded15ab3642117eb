"""Scheduler: how Conductor asks a policy and an admission, which may be anybody's code (report 6 and 7).

What they do wrong fails one request, with their name in the reason, and nothing else: raising, answering with something
other than a decision or with an instance that is not there, taking too long. They are shown requests without output
lengths. How long is too long says the time limit that is given: actors have no clock.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from mooncake_jax.request import Request
from mooncake_jax.sched.admission import Admission
from mooncake_jax.sched.decisions import Dispatch, Fault, Reject
from mooncake_jax.sched.inline import inline_if_better
from mooncake_jax.sched.policies import Policy
from mooncake_jax.sched.view import ClusterView, RequestView

MOST_SECONDS = 1.0  # that a decision may take
LONGEST_REASON = 200
_UNLIMITED = nullcontext()


class TooLong(BaseException):
    """Raised inside a decision by its time limit. No Exception, so that no policy catches it by accident."""


class Scheduler:
    """policy and admission with the names they were asked for by; time_limit: what every call of them runs in, and
    which raises TooLong there after MOST_SECONDS; longest_inlined: prompts of so many tokens may be prefilled where
    they are decoded (inline.py), 0 for none.
    """

    def __init__(
        self,
        policy: Policy,
        admission: Admission,
        policy_name: str = "",
        admission_name: str = "",
        time_limit: Callable[[], AbstractContextManager] = lambda: _UNLIMITED,
        longest_inlined: int = 0,
    ):
        self.policy, self.admission = policy, admission
        # Whether the admission looks at a request again once its prefill has ended.
        self.judges_prefilled = getattr(type(admission), "on_prefilled", None) is not Admission.on_prefilled
        self._policy_name = f"policy {policy_name or type(policy).__name__}"
        self._admission_name = f"admission {admission_name or type(admission).__name__}"
        self._time_limit, self._longest_inlined = time_limit, longest_inlined
        self.faults: Counter[str] = Counter()  # what went wrong, those that failed no request too

    def dispatch(self, request: Request, view: ClusterView, now: float) -> Dispatch | Reject | Fault:
        """Where a request goes that has arrived."""
        if not (view.prefill and view.decoding):
            return Fault(f"no {'decoding' if view.prefill else 'prefill'} instance is alive")
        asked = RequestView.of(request)
        chosen = self._ask(self._policy_name, self.policy.choose, asked, view, now)
        if isinstance(chosen, Reject | Fault):
            return self._sound(self._policy_name, chosen)
        if (wrong := _wrong(chosen, view)) is not None:
            return self._fault(f"{self._policy_name} {wrong}")
        if asked.prompt_tokens <= self._longest_inlined:
            chosen = inline_if_better(asked, chosen, view)
        verdict = self._judge(self.admission.on_arrival, asked, chosen, view, now)
        return chosen if verdict is None else verdict

    def prefilled(self, request: Request, decoding: str, view: ClusterView, now: float) -> Reject | Fault | None:
        """Whether a request whose prefill has ended, which the view knows, is not to be decoded after all."""
        if not self.judges_prefilled:
            return None
        return self._judge(self.admission.on_prefilled, RequestView.of(request), decoding, view, now)

    def completed(self, request: Request, output_tokens: int, decoding_seconds: float) -> None:
        """Tell what became of a request."""
        asked = RequestView.of(request)
        self._ask(self._admission_name, self.admission.on_completed, asked, output_tokens, decoding_seconds)

    def _judge(self, ask: Callable, *arguments) -> Reject | Fault | None:
        verdict = self._ask(self._admission_name, ask, *arguments)
        if verdict is None:
            return None
        if isinstance(verdict, Reject | Fault):
            return self._sound(self._admission_name, verdict)
        return self._fault(f"{self._admission_name} answered {_shown(verdict)}, neither Reject nor None")

    def _sound(self, name: str, verdict: Reject | Fault) -> Reject | Fault:
        """A rejection is written down and shown: as a line and numbers, whoever made it."""
        if isinstance(verdict, Fault):
            return verdict
        if type(verdict.reason) is not str:
            return self._fault(f"{name} rejects with the reason {_shown(verdict.reason)}, no text")
        for number in (verdict.estimate, verdict.limit):
            if number is not None and type(number) not in (int, float):
                return self._fault(f"{name} rejects with an estimate or limit of {_shown(number)}, no number")
        return verdict

    def _ask(self, name: str, ask: Callable, *arguments):
        try:
            with self._time_limit():
                return ask(*arguments)
        except TooLong:
            return self._fault(f"{name} took longer than {MOST_SECONDS:g} s")
        except Exception as error:  # it is anybody's code
            return self._fault(f"{name} raised {type(error).__name__}: {error}")

    def _fault(self, reason: str) -> Fault:
        line = " ".join(reason.split())
        fault = Fault(line if len(line) <= LONGEST_REASON else line[: LONGEST_REASON - 3] + "...")
        self.faults[fault.reason] += 1
        return fault


def _wrong(chosen: object, view: ClusterView) -> str | None:
    """What is wrong with a policy's answer."""
    if type(chosen) is not Dispatch:
        return f"answered {_shown(chosen)}, neither Dispatch nor Reject"
    source = chosen.replicate_from
    if chosen.inlined is not False:
        return "inlines a prefill, which --inline_prefill decides"
    if chosen.prefill not in view.prefill:
        return f"chose {_shown(chosen.prefill)}, which is no prefill instance here"
    if chosen.decoding not in view.decoding:
        return f"chose {_shown(chosen.decoding)}, which is no decoding instance here"
    if view.coupled and (source is not None or chosen.prefill != chosen.decoding):
        return f"sends KVCache to {_shown(chosen.decoding)}, but coupled instances send one another none"
    if source is not None and source not in view.prefill and source not in view.moved:
        return f"copies from {_shown(source)}, which is no prefill instance here"
    if source is not None and not (type(chosen.replicate_blocks) is int and chosen.replicate_blocks >= 0):
        return f"copies {_shown(chosen.replicate_blocks)} blocks"
    for name in ("ttft", "tbt"):
        seconds = getattr(chosen, name)
        if type(seconds) not in (int, float) or not seconds >= 0:
            return f"predicts a {name} of {_shown(seconds)}, no number of seconds"
    return None


def _shown(value: object) -> str:
    return repr(value)[:60]
