"""What a HostAccumulator folds: any type, strides, byte order and address."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_sparse.arrays import HostAccumulator
from support import kernels_reference as reference
from unit.kernels.drawing import SEEDS, bfloat16_bits, make

NAMES = ("float32", "float64", "float16", "bfloat16")


def held(name, n, seed):
    made = make("gaussian", n, seed, np.float64 if name == "float64" else np.float32)
    return bfloat16_bits(made) if name == "bfloat16" else made.astype(name)


@given(seed=SEEDS, name=st.sampled_from(NAMES), form=st.integers(0, 6))
@settings(max_examples=60, deadline=None)
def test_any_strides(seed, name, form):
    whole = held(name, 40 * 50 * 3, seed).reshape(40, 50, 3)
    if name != "bfloat16":
        whole[-1, ::7, :] = np.nan
    view = [
        whole,
        whole[::2],
        whole[:, ::-1],
        whole.transpose(2, 0, 1),
        whole[..., 1],
        whole[3:4, 5:6],
        np.asfortranarray(whole),
    ][form]
    expected = reference.fold(
        np.zeros(view.size, np.float64 if name == "float64" else np.float32), view.reshape(-1).copy()
    )
    outside = whole.size - view.size if view.base is not None else 0
    accumulator = HostAccumulator(view.size, name)
    report = accumulator.fold(view)
    np.testing.assert_array_equal(accumulator.values(), expected.values)
    assert report.num_nonfinite == expected.nonfinite.size
    assert report.first_nonfinite == (expected.nonfinite[0] if expected.nonfinite.size else -1)
    assert not view.view(view.dtype).any()
    assert np.count_nonzero(whole) <= max(outside, whole.size if form == 6 else 0)


def test_many_pieces_of_a_strided_gradient():
    pair = make("layers", 2 * 300_001, 3).reshape(-1, 2)
    pair[250_000, 0] = np.inf
    expected = reference.fold(np.zeros(300_001, np.float32), pair[:, 0].copy())
    accumulator = HostAccumulator(300_001)
    report = accumulator.fold(pair[:, 0])
    assert (report.num_nonfinite, report.first_nonfinite) == (1, 250_000)
    np.testing.assert_array_equal(accumulator.values(), expected.values)
    np.testing.assert_array_equal(
        accumulator.largest(500), reference.largest(expected.values, 500, 0, 300_001)
    )
    assert not pair[:, 0].any()
    assert pair[:, 1].all()


def test_memory_that_is_shared_within_the_gradient():
    row = np.arange(5.0, dtype=np.float32)
    accumulator = HostAccumulator(20)
    accumulator.fold(np.lib.stride_tricks.as_strided(row, (4, 5), (0, 4)))
    assert accumulator.values().tolist() == [0, 1, 2, 3, 4] * 4
    assert not row.any()


def test_byte_order_and_odd_addresses():
    accumulator = HostAccumulator(100)
    gradient = np.arange(100, dtype=">f4")
    accumulator.fold(gradient)
    odd = np.zeros(401, np.uint8)[1:].view(np.float32)
    odd[:] = 1
    accumulator.fold(odd)
    assert accumulator.values().tolist() == [i + 1 for i in range(100)]
    assert not gradient.any()
    assert not odd.any()


def test_bfloat16_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    accumulator = HostAccumulator(3, "bfloat16")
    gradient = np.array([1.5, -2.0, 0.0], ml_dtypes.bfloat16)
    accumulator.fold(gradient)
    assert accumulator.values().tolist() == [1.5, -2.0, 0.0]
    assert not gradient.astype(np.float32).any()
