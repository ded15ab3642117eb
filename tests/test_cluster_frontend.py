"""The front end: what is rejected before it is scheduled, and why."""

import dataclasses

import pytest

from mooncake_jax.cache.keys import block_keys, root_key
from mooncake_jax.cluster.frontend import ServingLimits, answers, tokenise, with_block_keys, within_context
from mooncake_jax.errors import UsageError
from mooncake_jax.metrics import outcome
from mooncake_jax.request import COMPLETED, Request, Sampling
from mooncake_jax.workload.prompts import Prompt

LIMITS = ServingLimits(max_context=100, vocab_size=50, device_kv_tokens=80)


def request(length=10, output=5, **changes):
    return dataclasses.replace(Request("r", 0.0, length, output, tuple(range(1, length + 1))[:length]), **changes)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (request(0), "the prompt is empty"),
        (request(100), "the prompt has 100 tokens: with an output it must fit the context of 100"),
        (request(output=0), "max_tokens is 0: it must be at least 1"),
        (request(prompt_ids=(1, 50)), "token id 50 is out of the vocabulary of 50"),
        (request(prompt_ids=(-1, 5)), "token id -1 is out of the vocabulary of 50"),
        (request(stop_ids=(3, 50)), "stop token id 50 is out of the vocabulary of 50"),
        (request(stop_ids=(-1,)), "stop token id -1 is out of the vocabulary of 50"),
        (request(40, 60), "its 100 tokens of KVCache exceed --device_kv_tokens=80"),
    ],
)
def test_what_cannot_be_served_is_told_why(bad, reason):
    assert LIMITS.why_invalid(bad) == reason


def test_what_just_fits_is_served():
    assert LIMITS.why_invalid(request(40, 40, stop_ids=(0, 49))) is None
    assert ServingLimits(100, 200, 200).why_invalid(request(99, 1)) is None


def test_outputs_end_where_the_context_does():
    short, long, over = within_context([request(10, 5), request(90, 50), request(120, 5)], 100)
    assert (short.output_length, long.output_length, over.output_length) == (5, 10, 5)


def test_keys_cover_the_full_blocks():
    [keyed] = with_block_keys([request(10)], b"model", 4, LIMITS)
    assert keyed.block_keys == block_keys(range(1, 11), 4, root_key(b"model", 4))
    assert len(keyed.block_keys) == 2


def test_salts_keep_tenants_apart():
    tenants = [request(10, cache_salt=salt) for salt in ("", "a", "b", "a")]
    keys = [keyed.block_keys[0] for keyed in with_block_keys(tenants, b"model", 4, LIMITS)]
    assert keys[1] == keys[3]
    assert len(set(keys)) == 3


@pytest.mark.parametrize("token_id", [2**63, -(2**70)])
def test_what_cannot_be_served_needs_no_keys(token_id):
    [keyed] = with_block_keys([request(prompt_ids=(token_id,) * 10)], b"model", 4, LIMITS)
    assert keyed.block_keys == ()


def test_ids_need_no_tokenizer_and_text_does():
    options = {"max_tokens": 9, "temperature": 0.5, "ignore_eos": True, "stop_token_ids": (8,)}
    [r] = tokenise([Prompt("a", 1.0, prompt_ids=(3, 4), **options)], None, seed=7)
    assert (r.arrival, r.prompt_tokens, r.output_length, r.ignore_eos, r.stop_ids) == (1.0, 2, 9, True, (8,))
    assert (r.sampling.temperature, r.sampling.top_p) == (0.5, 1.0)
    with pytest.raises(UsageError, match="prompt b: this model has no tokenizer"):
        tokenise([Prompt("b", 0.0, text="hello")], None, seed=0)
    with pytest.raises(UsageError, match="prompt c: .* give stop_token_ids instead of stop"):
        tokenise([Prompt("c", 0.0, prompt_ids=(3,), stop=("end",))], None, seed=0)


def test_sampling_is_the_prompts_own_and_does_not_depend_on_its_place():
    own = Prompt("b", 0.0, prompt_ids=(1,), temperature=1.0, top_k=4, top_p=0.5, seed=70, logprobs=2)
    other = Prompt("a", 0.0, prompt_ids=(1,))
    first, named = tokenise([other, own], None, seed=7)
    assert named.sampling == Sampling(1.0, 4, 0.5, 70, 2)
    assert tokenise([own, other], None, seed=7)[1] == first != tokenise([other], None, seed=8)[0]


def test_an_answer_ends_before_its_own_stop_string():
    class Letters:
        def decode(self, ids):
            return "".join(map(chr, ids))

    requests = [request(id="a", stop=("d", "cd")), request(id="b")]
    text = answers(Letters(), requests)
    told = [text(outcome(r, COMPLETED, token_times=(1.0,) * 4, token_ids=list(b"abcd"))) for r in requests]
    assert told == ["ab", "abcd"]
    assert text(outcome(requests[0], COMPLETED)) is None
