"""Sampling: greedy at temperature 0, the softmax's frequencies above it, and nothing of the batch in it."""

import jax
import numpy as np

from mooncake_jax.model.sampling import sample

sample_jitted = jax.jit(sample)
LOGITS = np.array([2.0, 1.0, 0.0, -1.0, -5.0], np.float32)


def draw(temperature, seeds, indices, logits=LOGITS):
    rows = len(seeds)
    logits = np.broadcast_to(logits, (rows, logits.shape[-1]))
    return np.asarray(
        sample_jitted(
            logits, np.full(rows, temperature, np.float32), np.asarray(seeds, np.uint32), np.asarray(indices, np.int32)
        )
    )


def test_temperature_zero_takes_the_highest_logit():
    assert draw(0.0, range(50), range(50)).tolist() == [0] * 50


def test_frequencies_follow_the_softmax():
    for temperature in (0.5, 1.0, 2.0):
        for seeds, indices in ((range(4000), [1] * 4000), ([7] * 4000, range(4000))):
            counts = np.bincount(draw(temperature, seeds, indices), minlength=5) / 4000
            np.testing.assert_allclose(counts, jax.nn.softmax(LOGITS / temperature), atol=0.035)


def test_a_row_is_the_same_in_any_batch_and_slot():
    logits = np.random.default_rng(0).standard_normal((8, 300)).astype(np.float32)
    temperature = np.array([0, 0.3, 1, 2, 0, 1, 1, 5], np.float32)
    seed, index = np.arange(8, dtype=np.uint32) * 77, np.arange(8, dtype=np.int32) % 3
    together = np.asarray(sample_jitted(logits, temperature, seed, index))
    order = np.array([5, 2, 7, 0, 1, 6, 4, 3])
    assert np.array_equal(sample_jitted(logits[order], temperature[order], seed[order], index[order]), together[order])
    for i in range(8):
        assert sample_jitted(logits[[i]], temperature[[i]], seed[[i]], index[[i]])[0] == together[i]


def test_seed_and_index_matter():
    logits = np.zeros(1000, np.float32)
    assert len(set(draw(1.0, range(20), [0] * 20, logits))) > 15
    assert len(set(draw(1.0, [3] * 20, range(20), logits))) > 15
