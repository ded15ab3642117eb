"""What a scheduler decides of a request: where it goes, or that it does not (report 6.1, algorithm 1)."""

from mooncake_jax.records import record


@record
class Dispatch:
    """Prefill here, decode there; first copy the leading `replicate_blocks` blocks from `replicate_from`, if that is
    set. inlined: the decoding instance computes the prompt itself, and is `prefill` too (inline.py; no policy says so).
    """

    prefill: str
    decoding: str
    ttft: float  # predicted, seconds
    tbt: float  # predicted for when it has joined all that has been sent there, seconds
    replicate_from: str | None = None
    replicate_blocks: int = 0
    inlined: bool = False


@record
class Reject:
    """reason: one line, for the user; without the estimate, so that a run's summary can count equal reasons. estimate
    and limit: the predicted seconds that were too many, and how many may be; None where no number decided.
    """

    reason: str
    estimate: float | None = None
    limit: float | None = None


@record
class Fault:
    """The request fails, for this reason: a policy or an admission went wrong itself, or nobody is there to serve."""

    reason: str


ENDINGS = Reject, Fault
