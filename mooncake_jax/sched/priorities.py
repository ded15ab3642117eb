"""Priorities 0 to 9: when not everything can be served, lower classes are rejected first (report 8, future work).

A queue looks longer to a class the more work the classes above it bring: if they are a share s of the demand, then by
1 / (1 - s), as in a queue that serves by priority. So lower classes reach their SLO earlier and leave the rest of it to
those above. Who is alone, or finds nothing queued, loses nothing, and where all are of one class nothing changes.
"""

from mooncake_jax.sched.view import RequestView

CLASSES = 10
MEMORY = 0.99  # the weight of what was known when a request arrives: about the last hundred count
MOST = 0.9  # of the demand; a class is never shut out altogether


class Demand:
    """Prompt tokens that have lately arrived, by class."""

    def __init__(self):
        self._tokens = [0.0] * CLASSES

    def arrived(self, request: RequestView) -> None:
        self._tokens = [MEMORY * tokens for tokens in self._tokens]
        self._tokens[request.priority] += request.prompt_tokens

    def felt(self, request: RequestView, seconds: float) -> float:
        """How long a wait of so many seconds counts for this request's class."""
        if not any(self._tokens[request.priority + 1 :]):
            return seconds
        above = total = 0.0
        for priority, tokens in enumerate(self._tokens):
            total += tokens
            if priority > request.priority:
                above += tokens
        return seconds / (1.0 - min(above / total, MOST))
