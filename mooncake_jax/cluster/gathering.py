"""Gathering what every stage of an instance has to say about the same dispatch."""

import threading
from typing import Any


class Gathering:
    """Answers by dispatch and stage, until all stages have answered. May be used from any thread."""

    def __init__(self, stages: int):
        self._stages = stages
        self._answers: dict[int, dict[int, Any]] = {}
        self._lock = threading.Lock()

    def add(self, dispatch: int, stage: int, answer: Any) -> list[Any] | None:
        """All answers in the order of stages, once this one completes them. A stage's later answer replaces an earlier
        one.
        """
        with self._lock:
            answers = self._answers.setdefault(dispatch, {})
            answers[stage] = answer
            if len(answers) < self._stages:
                return None
            del self._answers[dispatch]
            return [answers[stage] for stage in range(self._stages)]
