"""Sums and selections against their reference, bit for bit, and folds of odd numbers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_sparse import kernels
from horovod_sparse.arrays import HostAccumulator
from horovod_sparse.errors import ArgumentError, MessageError
from horovod_sparse.kernels.host import scatter
from support import reference
from support.drawing import SEEDS, make
from support.gradients import DTYPES, as_gradient
from support.sampling import rows_by


def indices_for(n, k, seed):
    return np.random.default_rng(seed).integers(0, n, k).astype(np.int32)


@given(
    name=st.sampled_from(DTYPES),
    kind=st.sampled_from(["zeros", "negative zeros", "sparse", "gaussian"]),
    n=st.integers(1, 500),
    offset=st.integers(0, 17),
    counts=st.lists(st.integers(0, 300), max_size=5),
    in_order=st.booleans(),
    seed=SEEDS,
    large=st.booleans(),
    whole=st.booleans(),
    scale=st.sampled_from([1.0, 1 / 3]),
)
@settings(max_examples=140, deadline=None)
def test_a_sum_in_order_rounded_once_takes_the_gradients_place(
    name, kind, n, offset, counts, in_order, seed, large, whole, scale
):
    wide, is_half = np.float64 if name == "float64" else np.float32, name.endswith("16")
    scale = 1.0 if is_half else scale  # two roundings would be the reference's
    memory = as_gradient(make(kind, n + offset + 20, seed), name)
    before, dense = memory.copy(), memory[offset : offset + n]
    drawn = [indices_for(n, k, seed ^ k) for k in counts]
    indices = np.concatenate([np.sort(run) if in_order else run for run in drawn] or [np.empty(0, np.int32)])
    values = make("ties" if whole else "gaussian", indices.size, seed ^ 1, wide)
    expected, touched = reference.add_into(np.zeros(n, wide), indices, values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scatter, "TILE", 48)
        patch.setattr(scatter, "_MOST_RUNS", 8)
        patch.setattr(scatter, "_LARGE", 0 if large else 1 << 30)
        assert kernels.apply_scaled_sum(dense, indices, values, scale) == touched
    expected = expected * wide(scale)
    if is_half:
        expected = torch.from_numpy(expected).to(getattr(torch, name)).float().numpy()
    np.testing.assert_array_equal(reference.widen(dense, wide), expected)
    dense[:] = before[offset : offset + n]
    np.testing.assert_array_equal(memory, before)


def test_every_float32_pattern_rounds_to_bfloat16_as_torch_does():
    bits = np.random.default_rng(3).integers(0, 2**32, 50_000, dtype=np.uint32)
    bits[:7] = [0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0x7FFFFFFF, 0x7F800001, 0x00018000, 0x00008000]
    values = bits.view(np.float32)
    dense = np.zeros(values.size, np.uint16)
    kernels.apply_scaled_sum(dense, np.arange(values.size), values, 1.0)
    expected = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(reference.widen(dense, np.float32), expected)


@rows_by("wrong,dtype", [-1, 10, 2**31 - 1, 2**40, -(2**40)], [np.float32, np.float64, np.float16, np.uint16])
def test_an_index_outside_is_refused_and_nothing_written(wrong, dtype):
    dense = np.zeros(10, dtype)
    for place in (0, 5):
        indices = np.arange(6, dtype=np.int64)
        indices[place] = wrong
        with pytest.raises(MessageError, match=str(wrong)):
            kernels.apply_scaled_sum(dense, indices, np.ones(6), 1.0)
    assert not dense.any()


def test_mismatched_indices_and_values_are_refused():
    dense = np.zeros(10, np.float32)
    with pytest.raises(MessageError, match="2 indices came with 3"):
        kernels.apply_scaled_sum(dense, [1, 2], [1.0, 2.0, 3.0], 1.0)
    with pytest.raises(MessageError, match="float"):
        kernels.apply_scaled_sum(dense, np.array([1.0]), [1.0], 1.0)
    with pytest.raises(ArgumentError, match="dense"):
        kernels.apply_scaled_sum(np.zeros((4, 4), np.float32)[:, 1], [1], [1.0], 1.0)
    with pytest.raises(ArgumentError, match="dtype"):
        kernels.apply_scaled_sum(np.zeros(4, np.int32), [1], [1.0], 1.0)


@given(offset=st.integers(0, 7), k=st.integers(0, 50), seed=SEEDS)
@settings(max_examples=20, deadline=None)
def test_read_only_and_unaligned_messages(offset, k, seed):
    indices, values = indices_for(100, k, seed), make("gaussian", k, seed)
    message = b"x" * offset + indices.tobytes() + values.tobytes()
    dense = np.zeros(100, np.float32)
    received = (
        np.frombuffer(message, np.int32, k, offset),
        np.frombuffer(message, np.float32, k, offset + 4 * k),
    )
    kernels.apply_scaled_sum(dense, *received, 1.0)
    np.testing.assert_array_equal(dense, reference.add_into(np.zeros(100, np.float32), indices, values)[0])


def test_a_threshold_between_two_float32():
    accumulator = HostAccumulator(3)
    accumulator.assign(np.array([1.0, 2.0, 2.0000002], np.float32))
    for threshold, expected in ((2.0, [1, 2]), (2.0 + 1e-9, [2]), (2.0000003, []), (1.0 - 1e-12, [0, 1, 2])):
        assert accumulator.at_least(threshold).tolist() == expected
