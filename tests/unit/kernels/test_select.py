"""Thresholds and exact ranks against their reference; selections of an accumulator: see unit/arrays."""

import numpy as np
import pytest

from horovod_sparse.arrays import Moments
from horovod_sparse.kernels.host import select
from horovod_sparse.kernels.host.statistics import moments_at_least
from horovod_sparse.kernels.layout import Layout, bits_dtype, bits_of
from support import reference
from support.sampling import rows_by
from unit.kernels.drawing import FLOATS, KINDS, make


def maxima_of(values, block):
    return reference.block_maxima(values, block).view(bits_dtype(values.dtype))


def test_blocks_of_which_a_sample_tells_nothing():
    """Every seventh block is looked at: too large where they alone are, too small where others are."""
    values = np.random.default_rng(0).standard_normal(64 * 7 * 3000).astype(np.float32)
    for factors in ([100] + 6 * [1], [0.01] + 6 * [1]):
        scaled = (values.reshape(-1, 7, 64) * np.array(factors, np.float32)[:, None]).reshape(-1)
        found = select.largest(scaled, maxima_of(scaled, 64), 8000, 0, scaled.size, Layout(scaled.size))
        np.testing.assert_array_equal(found, reference.largest(scaled, 8000, 0, scaled.size))


@rows_by("kind,k,dtype", KINDS, [1, 300, 3000, 20_000, 100_000], FLOATS)
def test_top_k_of_torch(kind, k, dtype):
    torch = pytest.importorskip("torch")
    values = make(kind, 200_003, 11, dtype)
    got = select.largest(values, maxima_of(values, 64), k, 0, values.size, Layout(values.size, 64))
    expected = torch.topk(torch.from_numpy(values).abs(), k, sorted=True).values.numpy()
    assert np.unique(got).size == k
    assert (np.diff(got) > 0).all()
    np.testing.assert_array_equal(np.sort(np.abs(values[got]))[::-1], expected)


def test_a_threshold_between_two_float32():
    values, layout = np.array([1.0, 2.0, 2.0000002], np.float32), Layout(3)
    for threshold, expected in ((2.0, [1, 2]), (2.0 + 1e-9, [2]), (2.0000003, []), (1.0 - 1e-12, [0, 1, 2])):
        bits = bits_of(threshold, values.dtype)
        assert select.at_least(values, maxima_of(values, 64), bits, 0, 3, layout).tolist() == expected


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
    reference.check_moments(Moments(*got), values, threshold)
