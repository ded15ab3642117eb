"""What a run leaves behind: summary.json, requests.jsonl, events.jsonl in one folder.

Rows are written as requests end, so that a run that is killed keeps what it completed; summary.json appears last and
whole.
"""

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from mooncake_jax.errors import UsageError
from mooncake_jax.metrics import outcome_row
from mooncake_jax.request import COMPLETED, FAILED, REJECTED, Outcome

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
FILES = ("requests.jsonl", "events.jsonl", "summary.json")


def check_writable(out: Path) -> None:
    """Raise UsageError if results cannot be written to this folder, or lie there already. Leaves nothing behind."""
    try:
        taken = [name for name in FILES if (out / name).exists()]
        folder = out
        while not folder.exists():
            folder = folder.parent
        if not taken and folder.is_dir():
            tempfile.TemporaryDirectory(dir=folder).cleanup()  # asking for permissions is not enough: root has them all
    except OSError as error:
        raise UsageError(f"--out={out}: {error.strerror}; choose another folder") from None
    if taken:
        raise UsageError(f"--out={out} already holds {taken[0]}: choose another folder, or remove it")
    if not folder.is_dir():
        raise UsageError(f"--out={out}: {folder} is a file; name a folder")


class Results:
    """Open files of one run. outcomes: every request that has ended, in that order. text: what an outcome's tokens
    say, where that is known. at_once: rows are in their files as soon as they are added, or else by close().
    """

    def __init__(
        self,
        out: Path,
        text: Callable[[Outcome], str | None] | None = None,
        events: bool = True,
        at_once: bool = True,
    ):
        check_writable(out)
        try:
            out.mkdir(parents=True, exist_ok=True)
            self._requests = (out / "requests.jsonl").open("w", encoding="utf-8")
            self._events = (out / "events.jsonl").open("w", encoding="utf-8") if events else None
        except OSError as error:
            raise UsageError(f"--out={out}: {error.strerror}; choose another folder") from None
        self.out, self._text, self._at_once = out, text, at_once
        self.outcomes: list[Outcome] = []
        self._counts = dict.fromkeys((COMPLETED, REJECTED, FAILED), 0)
        self._event_count = 0 if events else None

    def add(self, outcome: Outcome) -> dict[str, int]:
        """Write one row; returns how many requests ended in which way so far."""
        if self._text is not None:
            outcome = dataclasses.replace(outcome, text=self._text(outcome))
        self.outcomes.append(outcome)
        self._counts[outcome.status] += 1
        self._requests.write(_encode(outcome_row(outcome)) + "\n")
        if self._at_once:
            self._requests.flush()
        return self._counts

    def add_events(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._events.write(line + "\n")
            self._event_count += 1
        if self._at_once:
            self._events.flush()

    def finish(self, summary: dict) -> None:
        """Write summary.json, which says too how many events there were: an events.jsonl that was cut looks whole."""
        self.close()
        partial = self.out / ".summary.json.partial"
        summary = summary | {"events": self._event_count}
        partial.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.out / "summary.json")

    def close(self) -> None:
        """Nothing is added any more."""
        self._requests.close()
        if self._events is not None:
            self._events.close()
