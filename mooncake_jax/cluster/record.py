"""events.jsonl: what every actor handled and when, enough to run the actors again and compare
(docs/architecture.md, Seams: Cluster; verify.py).

One line an event: {"now", "node", "message", "actions"}; message is {"type", fields...}, bytes in hexadecimal;
actions is a digest of what the actor answered. Lines of one node are in order; lines of different nodes may
interleave out of order.
"""

import dataclasses
import hashlib
import json
import types
import typing
from collections.abc import Callable
from typing import Any

from mooncake_jax.field_types import check_type, field_types
from mooncake_jax.sched.actions import Action
from mooncake_jax.sched.messages import Message
from mooncake_jax.sched.serve import Actor

_MESSAGES = {message.__name__: message for message in typing.get_args(Message)}


def encode(value: Any) -> Any:
    """A message or action as JSON values."""
    if _is_record(value):
        fields = {name: encode(getattr(value, name)) for name in field_types(type(value))}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, tuple | list):
        return [encode(v) for v in value]
    if isinstance(value, bytes):
        return value.hex()
    return value


def decode(value: Any) -> Message:
    """The message that encode() turned into these JSON values. Raises KeyError, TypeError or ValueError if they are
    none.
    """
    return _decode_as(_MESSAGES[value["type"]], value)


def _is_record(value: Any) -> bool:
    """Whether this object or class has named fields."""
    return dataclasses.is_dataclass(value) or hasattr(value, "_fields")


def _decode_as(hint: Any, value: Any) -> Any:
    if _is_record(hint):
        return hint(**{name: _decode_as(of, value[name]) for name, of in field_types(hint).items()})
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        check_type("a tuple", list, value)
        of_each = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(_decode_as(h, v) for h, v in zip(of_each, value, strict=True))
    if origin in (types.UnionType, typing.Union):  # X | None
        return None if value is None else _decode_as(next(a for a in arguments if a is not type(None)), value)
    if hint is bytes:
        return bytes.fromhex(value)
    check_type("a field", hint, value)
    return value


def digest(actions: list[Action]) -> str:
    """Equal for equal actions, in every process."""
    text = json.dumps([encode(action) for action in actions], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def protocol() -> str:
    """Equal where messages and actions have the same fields: else a record cannot be compared with what actors do."""
    return fingerprint(*typing.get_args(Message), *typing.get_args(Action))


def fingerprint(*classes: type) -> str:
    """Of these classes' fields, and of those of the classes with fields in them."""
    shapes, left = {}, list(classes)
    while left:
        cls = left.pop()
        if cls.__name__ not in shapes:
            shapes[cls.__name__] = {name: str(hint) for name, hint in field_types(cls).items()}
            left += [part for hint in field_types(cls).values() for part in _records_in(hint)]
    return hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()[:16]


def _records_in(hint: Any) -> list[type]:
    if _is_record(hint):
        return [hint]
    return [found for argument in typing.get_args(hint) for found in _records_in(argument)]


class Recorded:
    """An actor whose events are written down as lines of events.jsonl."""

    def __init__(self, node: str, actor: Actor, write: Callable[[str], None]):
        self._node, self._actor, self._write = node, actor, write

    def handle(self, message: Message, now: float) -> list[Action]:
        actions = self._actor.handle(message, now)
        event = {"now": now, "node": self._node, "message": encode(message), "actions": digest(actions)}
        self._write(json.dumps(event, separators=(",", ":")))
        return actions
