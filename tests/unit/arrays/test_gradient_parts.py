"""Gradients in parts fold as one array does, and stay as they are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_sparse.arrays import GradientParts, HostAccumulator
from horovod_sparse.arrays import gradients as module
from horovod_sparse.errors import ArgumentError


def _drawn(sizes: list[int], dtype: str, seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(size).astype(dtype) for size in sizes]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([1, 3, 63, 64, 65, 300, 1000, 5000]), min_size=1, max_size=7),
    large=st.sampled_from([64, 256, 1 << 16]),
    seed=st.integers(0, 2**20),
)
def test_any_parts_fold_like_one_array(sizes, large, seed):
    arrays = _drawn(sizes, "float32", seed)
    whole = np.concatenate(arrays)
    expected, actual = HostAccumulator(whole.size), HostAccumulator(whole.size)
    before = [array.copy() for array in arrays]
    original, module._LARGE = module._LARGE, large
    try:
        for _ in range(2):
            expected.fold(whole.copy(), decay=0.5)
            actual.fold(GradientParts(arrays), decay=0.5)
    finally:
        module._LARGE = original
    assert np.array_equal(actual.values(), expected.values())
    assert np.array_equal(actual.largest(7), expected.largest(7))
    assert actual.report.square_norm == pytest.approx(expected.report.square_norm, rel=1e-6)
    for array, copy in zip(arrays, before, strict=True):
        assert np.array_equal(array, copy), "a part was changed"


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("momentum", [None, 0.5])
def test_not_finite_is_found_in_its_part_and_left_there(dtype, momentum):
    arrays = _drawn([100_001, 70_000, 7], dtype)
    arrays[1][69_999] = np.inf
    before = [array.copy() for array in arrays]
    accumulator = HostAccumulator(170_008, dtype, companions=1)
    report = accumulator.fold(GradientParts(arrays), momentum=momentum)
    assert (report.num_nonfinite, report.first_nonfinite) == (1, 170_000)
    assert np.isfinite(accumulator.values()).all()
    for array, copy in zip(arrays, before, strict=True):
        assert np.array_equal(array, copy)


def test_bits_of_bfloat16_and_memory_that_cannot_be_written():
    bits = np.array([16256, 16384], np.uint16)  # 1 and 2
    bits.flags.writeable = False
    accumulator = HostAccumulator(4, "bfloat16")
    accumulator.fold(GradientParts([bits, bits]))
    assert accumulator.values().tolist() == [1.0, 2.0, 1.0, 2.0]


def test_parts_of_different_types_are_refused():
    with pytest.raises(ArgumentError, match="one type"):
        GradientParts([np.zeros(2, np.float32), np.zeros(2, np.float64)])
    with pytest.raises(ArgumentError, match="array of 4 elements"):
        HostAccumulator(4).fold(GradientParts([np.zeros(3, np.float32)]))
