"""SmolLM2-135M through both engines in float32 against transformers: all ways of prefill, decoded alone and as one."""

import numpy as np
import pytest
from conftest import prefill

from mooncake_jax.model.loading import load_model
from mooncake_jax.parallel.decoding import DecodingEngine
from mooncake_jax.parallel.prefill import PrefillEngine


@pytest.fixture(scope="module")
def whole(smollm2):
    return PrefillEngine(smollm2, 2048)


@pytest.fixture(scope="module")
def by_64(smollm2):
    return PrefillEngine(smollm2, 64)


@pytest.fixture(scope="module")
def decoding(smollm2):
    return DecodingEngine(smollm2, max_batch=8, page_size=16, num_pages=160)


def assert_golden_start(first, case):
    ids, logits = zip(*first.top_logits, strict=True)
    golden = dict(case["first_logits_top10"])
    assert first.token == ids[0] == case["greedy"][0]
    assert set(ids) == set(golden)
    assert list(logits) == sorted(logits, reverse=True)
    np.testing.assert_allclose(logits, [golden[i] for i in ids], atol=2e-3, rtol=0)


def assert_golden_decoding(engine, cases, prefilled):
    """Joins all cases, steps until each has its golden number of tokens, and compares."""
    golden, output = dict(enumerate(case["greedy"] for case in cases)), {}
    for i, (first, kv) in enumerate(prefilled):
        assert_golden_start(first, cases[i])
        engine.join(i, kv, first.token, len(cases[i]["prompt_ids"]) + len(golden[i]))
        output[i] = [first.token]
    while any(i in engine for i in golden):
        for i, token in engine.step().items():
            output[i].append(token)
            if len(output[i]) == len(golden[i]):
                engine.leave(i)
        engine.check()
    assert output == golden


def test_whole_prompts_decoded_one_by_one(smollm2, smollm2_cases, whole, decoding):
    for case in smollm2_cases:
        assert_golden_decoding(decoding, [case], [prefill(whole, smollm2, case["prompt_ids"])])


@pytest.mark.slow
def test_chunks_of_64_decoded_together(smollm2, smollm2_cases, by_64, decoding):
    prefilled = [prefill(by_64, smollm2, case["prompt_ids"]) for case in smollm2_cases]
    assert_golden_decoding(decoding, smollm2_cases, prefilled)


def test_reused_prefixes_decoded_together(smollm2, smollm2_cases, by_64, decoding):
    for share in (0.0, 0.3, 0.8, 1.0):
        prefilled = []
        for case in smollm2_cases:
            ids = case["prompt_ids"]
            reused = max(1, int(share * (len(ids) - 1)))
            _, kv = prefill(by_64, smollm2, ids[:reused])
            prefilled.append(prefill(by_64, smollm2, ids, kv))
        assert_golden_decoding(decoding, smollm2_cases, prefilled)


@pytest.fixture(scope="module")
def rounded(smollm2_path):
    return load_model(smollm2_path, "bfloat16")


def first_difference(engine, case, first, kv, greedy):
    """(step, token) where a continuation first leaves the greedy one; None if it never does."""
    engine.join(1, kv, first.token, len(case["prompt_ids"]) + len(greedy))
    token = first.token
    for step, expected in enumerate(greedy):
        if token != expected:
            engine.leave(1)
            return step, token
        token = engine.step()[1]
    engine.leave(1)
    return None


def test_bfloat16_leaves_float32_only_where_the_margin_is_small(smollm2, rounded, smollm2_cases, whole):
    """At the first token that differs, float32 must have held the two likeliest within 0.25 of each other."""
    engine, decoding = PrefillEngine(rounded, 2048), DecodingEngine(rounded, max_batch=1, page_size=16, num_pages=160)
    for case in smollm2_cases:
        first, kv = prefill(engine, rounded, case["prompt_ids"])
        difference = first_difference(decoding, case, first, kv, case["greedy"])
        if difference is not None:
            ids = [*case["prompt_ids"], *case["greedy"][: difference[0]]]
            likeliest, second = whole.prefill(ids).top_logits[:2]
            assert likeliest[1] - second[1] < 0.25, (case["name"], difference)
