"""From prompts to requests: tokenising, block keys, and what cannot be served at all."""

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mooncake_jax.cache.keys import block_keys, root_key
from mooncake_jax.errors import UsageError
from mooncake_jax.model.stopping import until_stop
from mooncake_jax.model.tokenizer import Tokenizer
from mooncake_jax.request import Outcome, Request, Sampling
from mooncake_jax.workload.prompts import Prompt


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """What a request must keep to be served: the model's context and vocabulary, a decoding instance's memory in
    tokens.
    """

    max_context: int
    vocab_size: int
    device_kv_tokens: int

    def why_invalid(self, request: Request) -> str | None:
        """Why this request cannot be served, None if it can."""
        tokens = request.prompt_tokens
        if tokens == 0:
            return "the prompt is empty"
        if request.output_length < 1:
            return f"max_tokens is {request.output_length}: it must be at least 1"
        if tokens >= self.max_context:
            return f"the prompt has {tokens} tokens: with an output it must fit the context of {self.max_context}"
        low, high = min(request.prompt_ids), max(request.prompt_ids)
        if low < 0 or high >= self.vocab_size:
            return f"token id {low if low < 0 else high} is out of the vocabulary of {self.vocab_size}"
        for stop in request.stop_ids:
            if not 0 <= stop < self.vocab_size:
                return f"stop token id {stop} is out of the vocabulary of {self.vocab_size}"
        if tokens + request.output_length > self.device_kv_tokens:
            needed = tokens + request.output_length
            return f"its {needed} tokens of KVCache exceed --device_kv_tokens={self.device_kv_tokens}"
        return None


def tokenise(prompts: Sequence[Prompt], tokenizer: Tokenizer | None, seed: int) -> list[Request]:
    """Requests of prompts given as text, messages or ids; seed and its id are the seed of a prompt that names none.
    Raises UsageError naming the prompt.
    """
    return [_request(prompt, tokenizer, seed + zlib.crc32(prompt.id.encode())) for prompt in prompts]


def _request(prompt: Prompt, tokenizer: Tokenizer | None, seed: int) -> Request:
    ids = prompt.prompt_ids
    if prompt.stop and tokenizer is None:
        raise UsageError(f"prompt {prompt.id}: this model has no tokenizer; give stop_token_ids instead of stop")
    if ids is None:
        if tokenizer is None:
            raise UsageError(f"prompt {prompt.id}: this model has no tokenizer; give prompt_ids instead of text")
        try:
            text = prompt.text if prompt.messages is None else tokenizer.chat(prompt.messages)
        except UsageError as error:
            raise UsageError(f"prompt {prompt.id}: {error}") from None
        ids = tuple(tokenizer.encode(text))
    return Request(
        prompt.id,
        prompt.arrival,
        len(ids),
        prompt.max_tokens,
        ids,
        sampling=Sampling(
            prompt.temperature,
            prompt.top_k,
            prompt.top_p,
            seed if prompt.seed is None else prompt.seed,
            prompt.logprobs,
        ),
        ignore_eos=prompt.ignore_eos,
        stop=prompt.stop,
        stop_ids=prompt.stop_token_ids,
        cache_salt=prompt.cache_salt,
        priority=prompt.priority,
        ttft_slo=prompt.ttft_slo,
        tbt_slo=prompt.tbt_slo,
    )


def with_block_keys(
    requests: Iterable[Request], fingerprint: bytes, block_size: int, limits: ServingLimits
) -> list[Request]:
    """Requests with the keys of their full blocks; those that cannot be served stay without."""

    def keyed(request: Request) -> Request:
        if limits.why_invalid(request) is not None:
            return request
        root = root_key(fingerprint, block_size, request.cache_salt)
        return dataclasses.replace(request, block_keys=block_keys(request.prompt_ids, block_size, root))

    return [keyed(request) for request in requests]


def within_context(requests: Iterable[Request], max_context: int) -> list[Request]:
    """An output ends at the latest where the model's context does."""
    return [
        dataclasses.replace(r, output_length=min(r.output_length, max_context - r.prompt_tokens))
        if r.prompt_tokens < max_context
        else r
        for r in requests
    ]


def stop_ids(tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Token ids that end an output; none where the model comes without a tokenizer."""
    return tuple(sorted(tokenizer.eos_ids)) if tokenizer is not None else ()


def answers(tokenizer: Tokenizer | None, requests: Iterable[Request]) -> Callable[[Outcome], str | None]:
    """The text of an outcome of these requests, up to its stop string; None without a tokenizer or tokens."""
    stops = {request.id: request.stop for request in requests}

    def text(outcome: Outcome) -> str | None:
        if tokenizer is None or not outcome.token_ids:
            return None
        return until_stop(tokenizer.decode(outcome.token_ids), stops[outcome.id])

    return text
