"""What policies and admissions answer, which may be anybody's code, as plain values or not at all (report 6 and 7).

Names, numbers and texts are made anew: a subclass of str or float does anything where it is compared or written. Knows
nothing of how the answer came about (scheduler.py).
"""

import math
from numbers import Integral, Real

from mooncake_jax.sched.decisions import ENDINGS, Dispatch, Fault, Reject
from mooncake_jax.sched.texts import one_line, shown
from mooncake_jax.sched.view import ClusterView


class WrongAnswer(Exception):
    """Says what is wrong, as what follows the name of who has answered."""


def checked_choice(chosen: object, view: ClusterView) -> Dispatch | Reject | Fault:
    """A policy's answer. Raises WrongAnswer."""
    if isinstance(chosen, ENDINGS):
        return _checked_ending(chosen)
    if type(chosen) is not Dispatch:
        raise WrongAnswer(f"answered {shown(chosen)}, neither Dispatch nor Reject")
    if chosen.inlined is not False:
        raise WrongAnswer("inlines a prefill, which --inline_prefill decides")
    prefill, decoding = _name(chosen.prefill), _name(chosen.decoding)
    if prefill not in view.prefill:
        raise WrongAnswer(f"chose {shown(chosen.prefill)}, which is no prefill instance here")
    if decoding not in view.decoding:
        raise WrongAnswer(f"chose {shown(chosen.decoding)}, which is no decoding instance here")
    if view.coupled and (chosen.replicate_from is not None or prefill != decoding):
        raise WrongAnswer(f"sends KVCache to {shown(decoding)}, but coupled instances send one another none")
    source, blocks = _copy(chosen, view)
    ttft, tbt = _seconds("ttft", chosen.ttft), _seconds("tbt", chosen.tbt)
    return Dispatch(prefill, decoding, ttft, tbt, source, blocks)


def checked_verdict(verdict: object) -> Reject | Fault | None:
    """An admission's answer. Raises WrongAnswer."""
    if verdict is None:
        return None
    if isinstance(verdict, ENDINGS):
        return _checked_ending(verdict)
    raise WrongAnswer(f"answered {shown(verdict)}, neither Reject nor None")


def _checked_ending(verdict: Reject | Fault) -> Reject | Fault:
    """It is written down and shown: as a line and numbers, whoever made it."""
    verb, given = ("fails" if isinstance(verdict, Fault) else "rejects"), verdict.reason
    reason = _name(given)
    if reason is None:
        raise WrongAnswer(f"{verb} with the reason {shown(given)}, no text")
    if isinstance(verdict, Fault):
        return Fault(one_line(reason))
    numbers = []
    for number in (verdict.estimate, verdict.limit):
        numbers.append(None if number is None else _number(number))
        if number is not None and numbers[-1] is None:
            raise WrongAnswer(f"rejects with an estimate or limit of {shown(number)}, no number")
    return Reject(one_line(reason), *numbers)


def _copy(chosen: Dispatch, view: ClusterView) -> tuple[str | None, int]:
    """From where, and how many blocks."""
    if chosen.replicate_from is None:
        return None, 0
    source, blocks = _name(chosen.replicate_from), chosen.replicate_blocks
    if source not in view.prefill and source not in view.moved:
        raise WrongAnswer(f"copies from {shown(chosen.replicate_from)}, which is no prefill instance here")
    if not isinstance(blocks, Integral) or isinstance(blocks, bool) or blocks < 0:
        raise WrongAnswer(f"copies {shown(blocks)} blocks")
    return source, int(blocks)


def _seconds(name: str, value: object) -> float:
    seconds = _number(value)
    if seconds is None or not seconds >= 0:
        raise WrongAnswer(f"predicts a {name} of {shown(value)}, no number of seconds")
    return seconds


def _name(value: object) -> str | None:
    """Plain text; None if it is none, which no instance is called."""
    if type(value) is str:
        return value
    return str.__str__(value) if isinstance(value, str) else None


def _number(value: object) -> float | None:
    """A float, or an int that is no larger than one; None if it is no number."""
    if type(value) is float:
        return value
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return value if type(value) is int and math.isfinite(number) else number
