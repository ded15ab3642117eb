"""Costs of padded work: what the engine pads a prompt and a batch to, and that the cost model takes it for that."""

import pytest

from mooncake_jax.errors import UsageError
from mooncake_jax.parallel.prefill import chunk_buckets
from mooncake_jax.sched.cost import PolynomialCost
from mooncake_jax.sched.cost_padded import PaddedCost, padded_batch, padded_tokens

COEFFICIENTS = ((0.02, 1.5e-3, 2e-7), (0.03, 2e-3, 1e-6), (1e-4, 2e-10))


@pytest.mark.parametrize("chunk", [7, 16, 100, 512])
def test_prompts_are_padded_as_the_engine_pads_its_chunks(chunk):
    for tokens in range(1, 3 * chunk):
        starts = range(0, tokens, chunk)
        lengths = [min(chunk, tokens - start) for start in starts]
        computed = sum(min(bucket for bucket in chunk_buckets(chunk) if bucket >= length) for length in lengths)
        assert padded_tokens(tokens, chunk) == computed, tokens


def test_batches_are_padded_to_powers_of_two():
    assert [padded_batch(batch) for batch in range(10)] == [0, 1, 2, 4, 4, 8, 8, 8, 8, 16]


def test_work_costs_what_it_is_padded_to():
    padded, plain = PaddedCost(*COEFFICIENTS, chunk=512), PolynomialCost(*COEFFICIENTS)
    assert padded.prefill(300, 0) == padded.prefill(512, 0) == plain.prefill(512, 0)
    assert padded.prefill(1300, 1000) == plain.prefill(1512, 1000)
    assert padded.prefill_compute(520, 0) == plain.prefill_compute(528, 0)
    assert padded.step(3, 900) == plain.step(4, 1200) > plain.step(3, 900)
    assert padded.step(4, 1000) == plain.step(4, 1000) and padded.step(0, 0) == plain.step(0, 0)


def test_a_chunk_has_tokens():
    with pytest.raises(UsageError, match="chunk is 0; it must be at least 1"):
        PaddedCost(*COEFFICIENTS, chunk=0)
