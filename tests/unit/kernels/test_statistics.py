"""Counts and moments against their reference."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_sparse.kernels.host.statistics import count_at_least, moments_at_least
from horovod_sparse.kernels.layout import bits_dtype, bits_of
from support import kernels_reference as reference
from unit.kernels.drawing import SEEDS, arrays, make


@given(values=arrays(), thresholds=st.lists(st.floats(0, 4), max_size=5))
@settings(max_examples=60, deadline=None)
def test_counts(values, thresholds):
    word = bits_dtype(values.dtype)
    keys = np.array([bits_of(t, values.dtype) for t in thresholds], word)
    maxima = reference.block_maxima(values, 64).view(word)
    counts = np.full(len(thresholds), -1, np.int64)
    count_at_least(values, maxima, 64, keys, counts)
    np.testing.assert_array_equal(counts, reference.count_at_least(values, np.array(thresholds)))


@given(values=arrays(), threshold=st.sampled_from([0.0, 0.01, 1.0, 100.0]))
@settings(max_examples=120, deadline=None)
def test_moments(values, threshold):
    got = np.zeros(4)
    moments_at_least(values, bits_of(threshold, values.dtype), got)
    expected = reference.moments_at_least(values, threshold)
    assert got[0] == expected[0]
    np.testing.assert_allclose(got[1:3], expected[1:3], rtol=1e-5)
    # the sum of logarithms crosses 0: what counts is the error of their mean
    assert abs(got[3] - expected[3]) <= 1e-5 * max(expected[0], 1)


@given(seed=SEEDS, low=st.sampled_from([0.5, 1.0, 1.9999]))
@settings(max_examples=10, deadline=None)
def test_logarithms_of_fractions_that_grow(seed, low):
    values = (low + np.random.default_rng(seed).random(50_000) * 1e-4).astype(np.float32)
    got = np.zeros(4)
    moments_at_least(values, np.uint32(1), got)
    np.testing.assert_allclose(got[3], np.log(values.astype(np.float64)).sum(), rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_subnormal_numbers_among_others(dtype, threshold):
    """They have no 1 before their fraction, and too little weight to be noticed in sum or squares."""
    values = np.random.default_rng(5).standard_normal(5000).astype(dtype)
    tiny = np.finfo(dtype).tiny
    values[[70, 3000]] = tiny / 8
    values[[71, 4999]] = -tiny, np.nextafter(dtype(0), dtype(1))
    got = np.zeros(4)
    moments_at_least(values, bits_of(threshold, dtype), got)
    np.testing.assert_allclose(got, reference.moments_at_least(values, threshold), rtol=1e-6)


def test_moments_of_nothing():
    got = np.ones(4)
    moments_at_least(make("zeros", 5000, 0), np.uint32(1), got)
    assert not got.any()
