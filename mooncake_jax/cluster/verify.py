"""Running a recorded run again: fresh actors handle what its actors handled, and must answer the same (record.py).

It proves that actors are plain state and nothing else: what they do follows from the messages in events.jsonl and the
settings in summary.json alone, so that a simulation that hosts them decides as the real cluster does.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from mooncake_jax.cluster.actors import ActorSettings
from mooncake_jax.cluster.record import decode, digest, protocol
from mooncake_jax.errors import UsageError
from mooncake_jax.field_types import check_fields, check_type
from mooncake_jax.sched.messages import Message
from mooncake_jax.sched.serve import Actor

_MOST_ACTIONS_SHOWN = 4
_REMEDY = "verify it with the version that made it"

Settings = TypeVar("Settings")


@dataclass(frozen=True, slots=True)
class Difference:
    """An event that fresh actors answer otherwise. line: of events.jsonl, from 1; answer: what they do."""

    line: int
    now: float
    node: str
    message: str
    answer: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.node} on {self.message} at {self.now:.6f} s now answers {self.answer}"


@dataclass(frozen=True, slots=True)
class Verified:
    """events: how many were handled again."""

    events: int
    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class _Event:
    now: float
    node: str
    message: Message
    actions: str


@dataclass(frozen=True, slots=True)
class RecordedRun(Generic[Settings]):
    """What summary.json says of a record. settings: what the actors were made from; events: how many events.jsonl has,
    None where none were recorded.
    """

    settings: Settings
    events: int | None

    def check_whole(self, path: Path, events: int) -> None:
        """Raises UsageError if the events.jsonl at this path, which has so many, is not all that was recorded."""
        if events != self.events:
            wrote = "none" if self.events is None else self.events
            raise UsageError(
                f"{path} holds {events} events, its run recorded {wrote}; restore it from where it wrote it"
            )


def load_run(run: Path, make: Callable[[dict[str, Any]], Settings] = ActorSettings.from_json) -> RecordedRun[Settings]:
    """Of the run in this folder. make: of what summary.json has of the settings. Raises UsageError."""
    path = run / "summary.json"
    try:
        summary = json.loads(path.read_bytes())
        settings = summary["settings"]
        recorded = settings.pop("protocol", None)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; name the results folder of a run that has ended") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"{path} holds no run's settings; name the results folder of a run that has ended") from None
    if recorded != protocol():
        raise UsageError(
            f"{path}: the run's messages are of another version ({recorded!r:.40}, here {protocol()!r}); {_REMEDY}"
        )
    try:
        check_type("events", int | None, summary["events"])
        return RecordedRun(make(settings), summary["events"])
    except (LookupError, TypeError, ValueError, AttributeError, UsageError) as error:
        raise UsageError(f"{path}: its settings are not this version's ({_told(error)}); {_REMEDY}") from None


def make_actors(run: Path, make: Callable[[], Mapping[str, Actor]]) -> Mapping[str, Actor]:
    """Fresh actors of the run in this folder, from its settings. Raises UsageError."""
    try:
        return make()
    except UsageError:  # of a policy, an admission or a cost that is not here, which it names
        raise
    except Exception as error:  # settings of the right types may still be none that a cluster can be made of
        raise UsageError(
            f"{run / 'summary.json'}: no cluster can be made of its settings ({_told(error)}); {_REMEDY}"
        ) from None


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def verify(
    path: Path, actors: Mapping[str, Actor], progress: Callable[[int, int], None] = lambda done, total: None
) -> Verified:
    """Let these actors, fresh ones, handle the events of this file. progress: told bytes read, and of how many.

    An actor that raises differs, and goes on. Raises UsageError if the file cannot be read or holds something else.
    """
    events, differences = 0, []
    for events, event in enumerate(_events(path, actors, progress), 1):
        try:
            actions = actors[event.node].handle(event.message, event.now)
            if digest(actions) == event.actions:
                continue
            answer = _shown([type(action).__name__ for action in actions])
        except Exception as error:  # its state may be any after an earlier difference
            answer = f"by raising {_told(error)}"
        differences.append(Difference(events, event.now, event.node, type(event.message).__name__, answer))
    if not events:
        raise UsageError(f"{path} holds no event; the run must have been recorded")
    return Verified(events, tuple(differences))


def _events(path: Path, nodes: Mapping[str, Any], progress: Callable[[int, int], None]) -> Iterator[_Event]:
    done = 0
    try:
        total = path.stat().st_size
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield _parsed(path, number, line, nodes)
                done += len(line)
                progress(done, total)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; the run must have been recorded") from None


def _parsed(path: Path, number: int, line: bytes, nodes: Mapping[str, Any]) -> _Event:
    if not line.endswith(b"\n"):
        raise UsageError(f"{path} ends within line {number}; copy the whole file, or verify a run that has ended")
    try:
        fields = json.loads(line)
        check_fields(_Event, {name: fields[name] for name in ("now", "node", "actions")})
        event = _Event(fields["now"], fields["node"], decode(fields["message"]), fields["actions"])
        if not math.isfinite(event.now):
            raise ValueError("not a time")
        known = event.node in nodes
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
        raise UsageError(f"{path} line {number} is no event; restore the file from where the run wrote it") from None
    if not known:
        raise UsageError(f"{path} line {number}: the run has no {event.node!r}; its summary.json is another run's")
    return event


def _shown(names: list[str]) -> str:
    more = len(names) - _MOST_ACTIONS_SHOWN
    shown = ", ".join(names[:_MOST_ACTIONS_SHOWN]) or "nothing"
    return f"{shown} and {more} more" if more > 0 else shown
