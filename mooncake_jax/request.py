"""A request, the service levels it is held to, and how it ended.

Floor 0: knows nothing of models, schedulers or ranks. Times are seconds since the start of the run.
"""

import math
from dataclasses import dataclass

COMPLETED = "completed"
REJECTED = "rejected"
FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asks for.

    prompt_ids and block_keys are empty where only lengths are known. output_length is the most tokens the user takes
    (exactly that many with ignore_eos): instances stop by it, but no scheduling policy may read it.
    """

    id: str
    arrival: float
    prompt_tokens: int
    output_length: int
    prompt_ids: tuple[int, ...] = ()
    block_keys: tuple[bytes, ...] = ()  # one for each full block of the prompt, chained (report 3)
    temperature: float = 0.0  # 0: greedy
    ignore_eos: bool = False
    seed: int = 0
    cache_salt: str = ""  # tenants with different salts share no blocks


@dataclass(frozen=True, slots=True)
class SLO:
    """Service level objective: the longest TTFT and TBT, in seconds, that a request may meet with (report 2)."""

    ttft: float = math.inf
    tbt: float = math.inf


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended: one row of requests.jsonl, None where unknown. Every request ends exactly once.

    tbt_top10_s is the mean of the longest 10 % of the gaps between successive tokens (FAST25 5.2).
    """

    id: str
    arrival_s: float
    prompt_tokens: int
    reused_tokens: int | None
    output_tokens: int
    status: str  # COMPLETED, REJECTED or FAILED
    reason: str | None
    ttft_s: float | None
    tbt_mean_s: float | None
    tbt_p90_s: float | None
    tbt_top10_s: float | None
    prefill_instance: str | None
    decoding_instance: str | None
    token_ids: tuple[int, ...] | None
    text: str | None
