"""HostAccumulator: any history of calls against a model that keeps plain arrays."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_sparse.arrays import FoldRule, HostAccumulator
from horovod_sparse.errors import ArgumentError
from horovod_sparse.kernels.host import select
from support import reference
from unit.kernels.drawing import KINDS, SEEDS, SIZES, bfloat16_bits, make

NAMES = ("float32", "float64", "float16", "bfloat16")
CHANGES = ("clear", "add", "put", "mask", "largest", "at_least", "kth", "abandon", "take", "count")


def held(name, kind, n, seed):
    made = make(kind, n, seed, np.float64 if name == "float64" else np.float32)
    if name == "bfloat16":
        return bfloat16_bits(made)
    with np.errstate(all="ignore"):
        return np.nan_to_num(made.astype(name), posinf=1, neginf=1)


def choose(patch, way):
    """One of the ways to an exact rank, for all sizes and ranks."""
    if way == "some blocks":
        patch.setattr(select, "_SAMPLED", 0)
    elif way != "blocks":
        patch.setattr(select, "_fits_buffer", lambda *_: False)
    if way == "digits":
        patch.setattr(select, "between", lambda *_: (0, -1))


def check_selections(accumulator, values, generator):
    n = values.size
    start, stop = sorted(generator.integers(0, n + 1, 2).tolist())
    if generator.random() < 0.5:
        start, stop = 0, n
    # First what is content with upper bounds of the maxima: the others make them exact.
    threshold = float(np.sort(np.abs(values))[-generator.integers(1, min(n, 30) + 1)]) if n else 1.0
    got = accumulator.at_least(threshold, start, stop)
    np.testing.assert_array_equal(got, reference.at_least(values, threshold, start, stop))
    assert accumulator.count_at_least([threshold]) == reference.at_least(values, threshold, 0, n).size
    # Few enough that the maxima of the blocks bound the k-th; and more.
    most = (stop - start) // 64 if generator.random() < 0.7 else min(stop - start, 700)
    k = int(generator.integers(0, most + 1))
    got = accumulator.largest(k, start, stop)
    np.testing.assert_array_equal(got, reference.largest(values, k, start, stop))
    assert got.dtype == np.int32
    if k:
        kth = float(np.sort(np.abs(values[start:stop]))[-k])
        assert accumulator.kth_magnitude(k, start, stop) == kth
    chunk = int(generator.choice([1, 5, 64, 100, 4096]))
    windows = [(i, min(i + chunk, n)) for i in range(0, n, chunk)]
    quotas = [round(generator.choice([0.0, 0.003, 0.02, 0.4, 1.0]) * (last - i)) for i, last in windows]
    wanted = [reference.largest(values, k, *each) for k, each in zip(quotas, windows, strict=True)]
    got = accumulator.largest_of_each(chunk, np.array(quotas, np.int64))
    np.testing.assert_array_equal(got, np.concatenate([*wanted, np.empty(0, np.int32)]))
    for least in (0.0, threshold):
        reference.check_moments(accumulator.moments(least), values, least)


@pytest.mark.parametrize("way", ["blocks", "some blocks", "sample", "digits"])
@given(
    name=st.sampled_from(NAMES),
    kind=st.sampled_from(KINDS),
    n=SIZES,
    seed=SEEDS,
    density=st.sampled_from([0.001, 0.2]),
    companions=st.integers(0, 2),
    steps=st.lists(st.lists(st.sampled_from(CHANGES), max_size=6), min_size=1, max_size=4),
)
@settings(max_examples=30, deadline=None)
def test_any_history(way, name, kind, n, seed, density, companions, steps):
    generator = np.random.default_rng(seed)
    accumulator = HostAccumulator(n, name, density=density, companions=companions)
    arrays = [np.zeros(n, accumulator.dtype) for _ in range(1 + companions)]
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, way)
        for number, changes in enumerate(steps):
            gradient = held(name, kind, n, seed + number)
            momentum = 0.9 if companions and number % 2 else None
            folded = reference.fold(
                arrays[0],
                gradient,
                decay=0.5,
                velocity=arrays[1] if momentum else None,
                momentum=momentum or 0.0,
            )
            report = accumulator.fold(gradient, FoldRule(decay=0.5, momentum=momentum))
            arrays[0] = folded.values
            if momentum:
                arrays[1] = folded.companion
            assert report.num_nonfinite == folded.nonfinite.size
            at_fold = [array.copy() for array in arrays]
            for change in changes:
                indices = np.flatnonzero(generator.random(n) < generator.choice([0.001, 0.1, 0.9])).astype(
                    np.int32
                )
                if change == "clear":
                    accumulator.clear(indices)
                    for array in arrays:
                        array[indices] = 0
                elif change == "add":
                    new = (generator.standard_normal(indices.size) * 3).astype(accumulator.dtype)
                    accumulator.add(indices, new)
                    arrays[0][indices] += new
                elif change == "put":
                    new = (generator.standard_normal(indices.size) * 3).astype(accumulator.dtype)
                    accumulator.put(indices, new)
                    arrays[0][indices] = new
                elif change == "mask":
                    accumulator.mask(indices)
                    for array in arrays[1:]:
                        array[indices] = 0
                elif change == "abandon":
                    accumulator.abandon()
                    arrays = [array.copy() for array in at_fold]
                elif change == "take":
                    np.testing.assert_array_equal(accumulator.take(indices), arrays[0][indices])
                else:
                    check_selections(accumulator, arrays[0], generator)
                np.testing.assert_array_equal(accumulator.values(), arrays[0])
                for array, companion in zip(arrays[1:], accumulator.companions, strict=True):
                    np.testing.assert_array_equal(companion, array)
            check_selections(accumulator, arrays[0], generator)
            exact = float((arrays[0].astype(np.float64) ** 2).sum())
            np.testing.assert_allclose(
                accumulator.square_norm, exact, atol=1e-5 * (1 + report.square_norm + exact)
            )


def test_assigned_values_are_selected_from_and_stay():
    given, accumulator = make("gaussian", 1000, 1), HostAccumulator(1000)
    accumulator.assign(given.reshape(10, 100))
    np.testing.assert_array_equal(accumulator.largest(9), reference.largest(given, 9, 0, 1000))
    np.testing.assert_allclose(accumulator.square_norm, (given.astype(np.float64) ** 2).sum())
    accumulator.clear(np.array([5], np.int32))
    accumulator.abandon()
    np.testing.assert_array_equal(accumulator.values(), given)


def test_a_refused_gradient_does_not_forget_the_step():
    accumulator = HostAccumulator(3)
    accumulator.fold(np.array([1, 2, 3], np.float32))
    accumulator.clear(np.array([1], np.int32))
    with pytest.raises(ArgumentError):
        accumulator.fold(np.zeros(4, np.float32))
    accumulator.abandon()
    assert accumulator.values().tolist() == [1, 2, 3]


def test_memory_beyond_residual_and_gradient():
    tracemalloc = pytest.importorskip("tracemalloc")
    n = 2_000_000
    gradient = make("gaussian", n, 1)
    accumulator = HostAccumulator(n, density=0.001)
    accumulator.fold(gradient)
    gradient[:] = make("layers", n, 2)
    tracemalloc.start()
    try:
        accumulator.fold(gradient)
        indices = accumulator.largest(n // 1000)
        accumulator.at_least(accumulator.kth_magnitude(n // 1000), 0, n // 8)
        accumulator.take(indices)
        accumulator.clear(indices)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    maxima = 4 * n / 64
    assert maxima + peak <= 0.05 * 4 * n
