"""Sampling: greedy at temperature 0, the limited softmax's frequencies above it, and nothing of the batch in it."""

import jax
import numpy as np
import pytest

from mooncake_jax.model.sampling import NO_TOKEN, SamplingRows, logprobs, sample
from mooncake_jax.request import MOST_LOGPROBS, Sampling

sample_jitted = jax.jit(sample)
LOGITS = np.array([2.0, 1.0, 0.0, -1.0, -5.0], np.float32)


def sampling_rows(size, **columns):
    rows = SamplingRows.greedy(size)
    for name, values in columns.items():
        getattr(rows, name)[:] = values
    return rows


def draw(temperature, seeds, indices, logits=LOGITS, **limits):
    rows = sampling_rows(len(seeds), temperature=temperature, seed=list(seeds), index=list(indices), **limits)
    return np.asarray(sample_jitted(np.broadcast_to(logits, (len(seeds), logits.shape[-1])), rows))


def test_temperature_zero_takes_the_highest_logit():
    assert draw(0.0, range(50), range(50)).tolist() == [0] * 50


def test_frequencies_follow_the_softmax():
    for temperature in (0.5, 1.0, 2.0):
        for seeds, indices in ((range(4000), [1] * 4000), ([7] * 4000, range(4000))):
            counts = np.bincount(draw(temperature, seeds, indices), minlength=5) / 4000
            np.testing.assert_allclose(counts, jax.nn.softmax(LOGITS / temperature), atol=0.035)


@pytest.mark.parametrize(
    "limits, kept",
    [
        ({"top_k": 1}, [0]),
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_k": 9}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.6}, [0]),  # the softmax is 0.64, 0.24, 0.09, 0.03, 0.0006
        ({"top_p": 0.7}, [0, 1]),
        ({"top_p": 1e-9}, [0]),
        ({"top_p": 1e-60}, [0]),
        ({"top_k": 2, "top_p": 0.72}, [0]),  # of the two that top_k leaves, the first has 0.73
        ({"top_k": 2, "top_p": 0.74}, [0, 1]),
    ],
)
def test_limits_leave_the_softmax_of_what_they_keep(limits, kept):
    counts = np.bincount(draw(1.0, range(4000), range(4000), **limits), minlength=5) / 4000
    shares = np.zeros(5)
    shares[kept] = jax.nn.softmax(LOGITS[kept])
    np.testing.assert_allclose(counts, shares, atol=0.035)
    assert not counts[shares == 0].any()


def test_equal_logits_at_the_edge_keep_the_lower_ids():
    tied = np.array([0, 1, 1, 1, 1], np.float32)
    assert set(draw(1.0, range(200), range(200), tied, top_k=2)) == {1, 2}


def test_limits_do_not_touch_greedy_rows():
    assert draw(0.0, range(9), range(9), top_k=3, top_p=0.5).tolist() == [0] * 9


def test_a_row_is_the_same_in_any_batch_and_slot():
    logits = np.random.default_rng(0).standard_normal((8, 300)).astype(np.float32)
    rows = sampling_rows(
        8,
        temperature=[0, 0.3, 1, 2, 0, 1, 1, 5],
        top_k=[0, 0, 7, 0, 3, 2, 0, 50],
        top_p=[1, 1, 1, 0.4, 1, 0.9, 0.8, 1],
        seed=np.arange(8) * 77,
        index=np.arange(8) % 3,
    )
    together = np.asarray(sample_jitted(logits, rows))
    order = np.array([5, 2, 7, 0, 1, 6, 4, 3])
    shuffled = SamplingRows(*(column[order] for column in rows))
    assert np.array_equal(sample_jitted(logits[order], shuffled), together[order])
    for i in range(8):
        assert sample_jitted(logits[[i]], SamplingRows(*(column[[i]] for column in rows)))[0] == together[i]


def test_logprobs_are_those_of_the_softmax():
    logits = np.random.default_rng(1).standard_normal((3, 300)).astype(np.float32)
    expected = np.log(np.asarray(jax.nn.softmax(logits.astype(np.float64), axis=-1)))
    tokens = np.array([4, 299, 0], np.int32)
    taken, top, ids = jax.jit(logprobs)(logits, tokens, True)
    np.testing.assert_allclose(taken, expected[np.arange(3), tokens], atol=1e-5)
    np.testing.assert_array_equal(ids, np.argsort(-logits, axis=1)[:, :MOST_LOGPROBS])
    np.testing.assert_allclose(top, np.take_along_axis(expected, np.asarray(ids), 1), atol=1e-5)
    assert not any(np.any(part) for part in jax.jit(logprobs)(logits, tokens, False))


@pytest.mark.parametrize(
    "values, complaint",
    [
        ({"temperature": -0.1}, "temperature is -0.1; it must be 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"logprobs": 21}, "logprobs is 21; it must be 0 to 20"),
    ],
)
def test_values_that_cannot_be_sampled_with_are_named(values, complaint):
    with pytest.raises(ValueError, match=complaint):
        Sampling(**values)


@pytest.mark.parametrize("temperature", [1e-7, 2e-38])
def test_however_small_a_temperature_is_only_the_likeliest_are_drawn(temperature):
    for shift in (-100, 0, 100):
        assert set(draw(temperature, range(50), range(50), LOGITS + np.float32(shift), top_k=3)) == {0}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_give_no_token(bad):
    logits = np.zeros((3, 9), np.float32)
    logits[1, 4] = bad
    rows = sampling_rows(3, temperature=[0, 0, 1])
    assert np.asarray(sample_jitted(logits, rows))[:2].tolist() == [0, NO_TOKEN]
    rows = sampling_rows(3, temperature=1, top_k=2)
    assert (np.asarray(sample_jitted(logits, rows)) == NO_TOKEN).tolist() == [False, True, False]


def test_seed_and_index_matter():
    logits = np.zeros(1000, np.float32)
    assert len(set(draw(1.0, range(20), [0] * 20, logits))) > 15
    assert len(set(draw(1.0, [3] * 20, range(20), logits))) > 15
