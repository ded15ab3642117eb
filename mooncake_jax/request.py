"""A request and how its tokens are chosen, the service levels it is held to, and how it ended.

Floor 0: knows nothing of models, schedulers or ranks. Times are seconds since the start of the run.
"""

import math
from dataclasses import dataclass

from mooncake_jax.records import record

COMPLETED = "completed"
REJECTED = "rejected"
FAILED = "failed"

MOST_LOGPROBS = 20  # alternatives a token that can be asked for


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request's tokens are chosen. Raises ValueError naming the first value that cannot be sampled with."""

    temperature: float = 0.0  # 0 takes the likeliest token, whatever the rest says
    top_k: int = 0  # draw only from the k likeliest; 0 from all
    top_p: float = 1.0  # draw only from the fewest that hold p of the probability; 1 from all
    seed: int = 0  # the low 32 bits count
    logprobs: int | None = None  # log-probabilities of the token taken and of so many likeliest; None: of none

    def __post_init__(self):
        for name, sound, wanted in (
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or more"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (all tokens)"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MOST_LOGPROBS, f"0 to {MOST_LOGPROBS}"),
        ):
            if not sound:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {wanted}")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities by the model's own logits: of the token taken, and of the likeliest ones as
    (id, logprob), highest first. Temperature, top_k and top_p do not change them.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]

    def limited(self, count: int | None) -> "TokenLogprobs | None":
        """With at most so many of the likeliest; None for None, as Sampling.logprobs has it."""
        return None if count is None else TokenLogprobs(self.logprob, self.top[:count])


@record
class Request:
    """What a user asks for.

    prompt_ids and block_keys are empty where only lengths are known. output_length is the most tokens the user takes:
    instances stop by it, but no scheduling policy may read it. An output ends sooner with one of stop_ids, when its
    text holds one of the texts in stop, and, without ignore_eos, with the model's own end of text.
    """

    id: str
    arrival: float
    prompt_tokens: int
    output_length: int
    prompt_ids: tuple[int, ...] = ()
    block_keys: tuple[bytes, ...] = ()  # one for each full block of the prompt, chained (report 3)
    sampling: Sampling = Sampling()
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    cache_salt: str = ""  # tenants with different salts share no blocks
    priority: int = 0  # 0 to 9; under overload lower ones are rejected first
    ttft_slo: float | None = None  # seconds; None: as the cluster has it
    tbt_slo: float | None = None


@dataclass(frozen=True, slots=True)
class SLO:
    """Service level objective: the longest TTFT and TBT, in seconds, that a request may meet with (report 2)."""

    ttft: float = math.inf
    tbt: float = math.inf


@record
class Outcome:
    """How a request ended: one row of requests.jsonl, None where unknown. Every request ends exactly once.

    priority, ttft_slo and tbt_slo are the request's own. estimate and limit: of a rejection, what was predicted to be
    too much, and how much may be. tbt_top10_s is the mean of the longest 10 % of the gaps between successive tokens
    (FAST25 5.2).
    """

    id: str
    arrival_s: float
    priority: int
    ttft_slo: float | None
    tbt_slo: float | None
    prompt_tokens: int
    reused_tokens: int | None
    output_tokens: int
    status: str  # COMPLETED, REJECTED or FAILED
    reason: str | None
    estimate: float | None
    limit: float | None
    ttft_s: float | None
    tbt_mean_s: float | None
    tbt_p90_s: float | None
    tbt_top10_s: float | None
    prefill_instance: str | None
    decoding_instance: str | None
    token_ids: tuple[int, ...] | None
    text: str | None
    logprobs: tuple[TokenLogprobs, ...] | None  # one for each token, where the request asked for them
