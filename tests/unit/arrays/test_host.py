"""HostAccumulator: any history of calls against plain arrays."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_sparse.arrays import FoldRule, GradientParts, HostAccumulator, gradients
from horovod_sparse.arrays.host import HostKernels
from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import parse_recipe
from horovod_sparse.kernels.host import select
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.tensors.accumulator import TorchAccumulator
from support import reference
from support.accumulators import histories, play
from support.drawing import make


def choose(patch, way):
    if way == "some blocks":
        patch.setattr(select, "_SAMPLED", 0)
    elif way != "blocks":
        patch.setattr(select, "_fits_buffer", lambda *_: False)
    if way == "digits":
        patch.setattr(select, "keys_between", lambda *_: (0, -1))


@pytest.mark.parametrize("way", ["blocks", "some blocks", "sample", "digits"])
@given(history=histories(), large=st.sampled_from([64, 256, 1 << 16]))
@settings(max_examples=16, deadline=None)
def test_any_history_equals_plain_arrays(way, history, large):
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, way)
        patch.setattr(gradients, "_LARGE", large)
        play(history)


def test_a_refused_gradient_does_not_forget_the_step():
    accumulator = HostAccumulator(3)
    accumulator.fold(np.array([1, 2, 3], np.float32))
    accumulator.clear(np.array([1], np.int32))
    with pytest.raises(ArgumentError):
        accumulator.fold(np.zeros(4, np.float32))
    accumulator.abandon()
    assert accumulator.values().tolist() == [1, 2, 3]
    with pytest.raises(ArgumentError, match="one dtype"):
        GradientParts([np.zeros(2, np.float32), np.zeros(2, np.float64)])
    with pytest.raises(ArgumentError, match="array of 4 elements"):
        HostAccumulator(4).fold(GradientParts([np.zeros(3, np.float32)]))


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


N = 700
FOLDS = {
    "plain": {},
    "momentum": {"momentum": 0.5},
    "Nesterov": {"momentum": 0.5, "nesterov": True},
    "clipped": {"clip_norm": 8.0},
    "moment": {"moment": 0.5, "rate": 0.25, "count": 3},
    "moment of a clipped": {"moment": 0.5, "rate": 0.25, "count": 3, "clip_norm": 8.0},
}


def both(companions: int):
    host = HostAccumulator(N, density=0.1, companions=companions)
    return host, TorchAccumulator(N, density=0.1, companions=companions, device="cpu")


def given_to(accumulator, gradient):
    return gradient if isinstance(accumulator, HostAccumulator) else torch.from_numpy(gradient)


@pytest.mark.parametrize("kind", FOLDS)
def test_an_abandoned_step_restores_values_and_companions(kind):
    generator = np.random.default_rng(1)
    first = (generator.integers(-64, 64, N) / 16).astype(np.float32)
    bad = (generator.integers(-64, 64, N) / 16).astype(np.float32)
    bad[5], bad[6], bad[7] = np.nan, np.inf, 1e30
    found = []
    keeps, normalizes = FoldRule(**FOLDS[kind]).num_companions, "moment" in FOLDS[kind]
    for accumulator in both(keeps):
        accumulator.fold(given_to(accumulator, first), FoldRule(**FOLDS[kind]))
        accumulator.clear(accumulator.largest(70))
        before = np.asarray(accumulator.companions[0]).copy() if normalizes else None
        gradient = bad.copy()
        accumulator.fold(given_to(accumulator, gradient), FoldRule(**FOLDS[kind]))
        np.testing.assert_array_equal(gradient, bad)
        accumulator.clear(accumulator.largest(70))
        accumulator.abandon()
        accumulator.drop(given_to(accumulator, gradient))
        found.append((accumulator.values().copy(), accumulator.largest(70), accumulator.square_norm))
        moment = np.asarray(accumulator.companions[0]) if normalizes else np.zeros(N)
        np.testing.assert_allclose(moment, before if normalizes else 0, rtol=1e-4, atol=1e-4)
    wanted = both(keeps)[0]
    wanted.fold(given_to(wanted, first), FoldRule(**FOLDS[kind]))
    wanted.clear(wanted.largest(70))
    values = wanted.values()
    others = np.arange(N) != 7
    for got, selected, norm in found:
        np.testing.assert_allclose(got[others], values[others], rtol=1e-5, atol=1e-5)
        assert abs(got[7]) <= 2 * abs(values[7])  # what 1e30 has swallowed cannot be told any more
        assert norm == pytest.approx(float(np.dot(got.astype(float), got)), rel=1e-6)
        assert np.abs(got[selected]).min() >= np.abs(np.delete(got, selected)).max()


def test_sums_that_had_overflowed_are_left_as_they_were():
    large = np.full(N, 3e38, np.float32)
    for accumulator in both(0):
        accumulator.fold(given_to(accumulator, large))
        accumulator.fold(given_to(accumulator, large))
        accumulator.drop(given_to(accumulator, large))
        assert np.isfinite(accumulator.values()).all()


@pytest.mark.parametrize("text", ["spardl:density=0.05", "oktopk:density=0.05", "topk:values=bfloat16"])
def test_returned_values_are_selected_without_a_pass_over_all(text, monkeypatch):
    monkeypatch.setattr(HostKernels, "scan_maxima", lambda *_: pytest.fail("a pass over n elements"))
    cluster, generator = SimulatedCluster(parse_recipe(text), 2000, 4), np.random.default_rng(0)
    for _ in range(3):
        cluster.step([generator.standard_normal(2000).astype(np.float32) for _ in range(4)])


@pytest.mark.parametrize("name", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["walk", "ties", "jumps"])
def test_bounds_of_the_fold_spare_a_pass_over_all(monkeypatch, name, kind):
    read, whole = [], select.largest
    monkeypatch.setattr(select, "largest", lambda *given: read.append(1) or whole(*given))
    generator, n = np.random.default_rng(3), 40_017
    accumulator = HostAccumulator(n, name, density=0.02, companions=1)
    for step in range(16):
        gradient = generator.standard_normal(n)
        if kind == "ties":
            gradient = np.round(4 * gradient) / 4
        gradient = (gradient * (10.0 ** generator.integers(-3, 4) if kind == "jumps" else 1)).astype(name)
        accumulator.fold(gradient, FoldRule(moment=0.9, count=step + 1) if kind == "walk" else FoldRule())
        k = 400 + step % 2
        held = np.array(accumulator.values())
        assert step % 2 or accumulator.kth_magnitude(k) == np.sort(np.abs(held))[-k]
        own = accumulator.largest(k)
        np.testing.assert_array_equal(own, reference.largest(held, k, 0, n))
        np.testing.assert_array_equal(accumulator.remove(own), held[own])
        again = accumulator.largest(k)  # of what is left
        left = np.array(accumulator.values())
        np.testing.assert_array_equal(again, reference.largest(left, k, 0, n))
    # the second selection of a step always reads all
    assert kind == "jumps" or len(read) < 28
