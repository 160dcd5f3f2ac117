"""A gradient that was folded leaves an accumulator again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from horovod_sparse.arrays import GradientParts, HostAccumulator
from horovod_sparse.pytorch.accumulator import TorchAccumulator
from horovod_sparse.pytorch.gradients import KeptTensor

N = 700
FOLDS = {
    "plain": {},
    "decay": {"decay": 0.5},
    "momentum": {"momentum": 0.5},
    "Nesterov": {"momentum": 0.5, "nesterov": True},
    "clipped": {"clip_norm": 8.0},
}


def both(companions: int):
    host = HostAccumulator(N, density=0.1, companions=companions)
    return host, TorchAccumulator(N, density=0.1, companions=companions, device="cpu")


def kept(accumulator, gradient):
    if isinstance(accumulator, HostAccumulator):
        return GradientParts([gradient])
    return KeptTensor(torch.from_numpy(gradient))


@pytest.mark.parametrize("kind", FOLDS)
def test_what_was_there_before_comes_back(kind):
    """Selections, too; and a gradient of zeros, folded in its place, would have given the same."""
    generator = np.random.default_rng(1)
    first = (generator.integers(-64, 64, N) / 16).astype(np.float32)
    bad = (generator.integers(-64, 64, N) / 16).astype(np.float32)
    bad[5], bad[6], bad[7] = np.nan, np.inf, 1e30
    found = []
    for accumulator in both("momentum" in FOLDS[kind]):
        accumulator.fold(kept(accumulator, first), **FOLDS[kind])
        accumulator.clear(accumulator.largest(70))
        gradient = bad.copy()
        accumulator.fold(kept(accumulator, gradient), **FOLDS[kind])
        np.testing.assert_array_equal(gradient, bad)
        accumulator.clear(accumulator.largest(70))
        accumulator.abandon()
        accumulator.drop(kept(accumulator, gradient))
        found.append((accumulator.values().copy(), accumulator.largest(70), accumulator.square_norm))
    wanted = both("momentum" in FOLDS[kind])[0]
    wanted.fold(kept(wanted, first), **FOLDS[kind])
    wanted.clear(wanted.largest(70))
    wanted.fold(np.zeros(N, np.float32), **FOLDS[kind])
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
        accumulator.fold(kept(accumulator, large))
        accumulator.fold(kept(accumulator, large))
        accumulator.drop(kept(accumulator, large))
        assert np.isfinite(accumulator.values()).all()


def test_a_refusal_stands_in_the_report():
    for accumulator in both(0):
        accumulator.fold(kept(accumulator, np.ones(N, np.float32)))
        accumulator.refuse()
        assert accumulator.report.first_nonfinite == N
        assert accumulator.report.square_norm == pytest.approx(N)
