"""Scatter-add and clearing, for every type, with repeated and wrong indices."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_sparse import kernels
from horovod_sparse.errors import ArgumentError, MessageError
from support import kernels_reference as reference
from support.gradients import as_gradient, wide
from unit.kernels.drawing import FLOATS, SEEDS, bfloat16_bits, make


def indices_for(n, k, seed):
    return np.random.default_rng(seed).integers(0, n, k).astype(np.int32)


@given(
    dtype=st.sampled_from(FLOATS),
    kind=st.sampled_from(["zeros", "negative zeros", "sparse", "gaussian"]),
    n=st.integers(1, 500),
    k=st.integers(0, 1500),
    seed=SEEDS,
    whole=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_sums_in_order(dtype, kind, n, k, seed, whole):
    dense, indices = make(kind, n, seed, dtype), indices_for(n, k, seed)
    values = make("ties" if whole else "gaussian", k, seed ^ 1, dtype)
    expected, touched = reference.add_into(dense, indices, values)
    assert kernels.apply_sum(dense, indices, values) == touched
    np.testing.assert_array_equal(dense, expected)


@given(n=st.integers(1, 300), k=st.integers(0, 900), seed=SEEDS, brain=st.booleans())
@settings(max_examples=80, deadline=None)
def test_half_types_are_rounded_once(n, k, seed, brain):
    start = make("sparse", n, seed)
    dense = bfloat16_bits(start) if brain else start.astype(np.float16)
    wide = reference.widen(dense, np.float32)
    indices, values = indices_for(n, k, seed), make("gaussian", k, seed ^ 1)
    expected, touched = reference.add_into(wide, indices, values)
    assert kernels.apply_sum(dense, indices, values) == touched
    if brain:
        torch = pytest.importorskip("torch")
        rounded = torch.from_numpy(expected).to(torch.bfloat16).float().numpy()
    else:
        rounded = expected.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(reference.widen(dense, np.float32), rounded)


def test_every_float32_pattern_rounds_to_bfloat16_as_torch_does():
    torch = pytest.importorskip("torch")
    bits = np.random.default_rng(3).integers(0, 2**32, 50_000, dtype=np.uint32)
    bits[:7] = [0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0x7FFFFFFF, 0x7F800001, 0x00018000, 0x00008000]
    values = bits.view(np.float32)
    dense = np.zeros(values.size, np.uint16)
    kernels.apply_sum(dense, np.arange(values.size), values)
    expected = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(reference.widen(dense, np.float32), expected)


def test_touches_are_counted_where_values_cancel():
    dense = np.zeros(5, np.float32)
    assert kernels.apply_sum(dense, [2, 2, 2, 4], [1.0, -1.0, 3.0, 0.0]) == 2
    assert dense.tolist() == [0, 0, 3, 0, 0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.uint16])
@pytest.mark.parametrize("wrong", [-1, 10, 2**31 - 1, 2**40, -(2**40)])
def test_an_index_outside_is_refused_and_nothing_written(dtype, wrong):
    dense = np.zeros(10, dtype)
    for place in (0, 5):
        indices = np.arange(6, dtype=np.int64)
        indices[place] = wrong
        with pytest.raises(MessageError, match=str(wrong)):
            kernels.apply_sum(dense, indices, np.ones(6))
        with pytest.raises(MessageError, match=str(wrong)):
            kernels.clear_at(dense, indices)
    assert not dense.any()


def test_messages_that_cannot_be():
    dense = np.zeros(10, np.float32)
    with pytest.raises(MessageError, match="2 indices came with 3"):
        kernels.apply_sum(dense, [1, 2], [1.0, 2.0, 3.0])
    with pytest.raises(MessageError, match="float"):
        kernels.apply_sum(dense, np.array([1.0]), [1.0])
    with pytest.raises(ArgumentError, match="dense"):
        kernels.apply_sum(np.zeros((4, 4), np.float32)[:, 1], [1], [1.0])
    with pytest.raises(ArgumentError, match="dtype"):
        kernels.apply_sum(np.zeros(4, np.int32), [1], [1.0])


@given(offset=st.integers(0, 7), k=st.integers(0, 50), seed=SEEDS)
@settings(max_examples=20, deadline=None)
def test_read_only_and_unaligned_messages(offset, k, seed):
    indices, values = indices_for(100, k, seed), make("gaussian", k, seed)
    message = b"x" * offset + indices.tobytes() + values.tobytes()
    dense = np.zeros(100, np.float32)
    kernels.apply_sum(
        dense,
        np.frombuffer(message, np.int32, k, offset),
        np.frombuffer(message, np.float32, k, offset + 4 * k),
    )
    np.testing.assert_array_equal(dense, reference.add_into(np.zeros(100, np.float32), indices, values)[0])


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.uint16])
def test_clear_at(dtype):
    dense = np.ones((3, 4), dtype)
    kernels.clear_at(dense, [1, 1, 11])
    assert np.flatnonzero(dense.reshape(-1) == 0).tolist() == [1, 11]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_all_elements_need_no_indices(dtype: str, scale: float) -> None:
    """In place of whatever there is, rounded once."""
    values = np.array([1.0, -3.0, 0.0, 1 / 3], np.float64 if dtype == "float64" else np.float32)
    dense, one_by_one = as_gradient(np.full(4, 7.0), dtype), as_gradient(np.zeros(4), dtype)
    assert kernels.apply_scaled_sum(dense, None, values, scale, is_zero=False) == 4
    kernels.apply_scaled_sum(one_by_one, np.arange(4, dtype=np.int32), values, scale)
    np.testing.assert_array_equal(wide(dense), wide(one_by_one))
    with pytest.raises(MessageError, match="3 values came for a bucket of 4"):
        kernels.apply_scaled_sum(dense, None, values[:3], scale)
