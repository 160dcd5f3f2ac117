"""Law 5 for threshold rules: the union count stays near k, from the first step on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from horovod_sparse.feedback import recipe
from horovod_sparse.simulation import SimulatedCluster
from support.cases import CASES, Case, CountBand, case_id
from support.gradients import gaussian, laplace, layered

_NUM_ELEMENTS, _NUM_STEPS, _DROP_AT = 400_000, 24, 14
_DENSITY, _TARGET = 0.025, 10_000  # the least that the promise is made for


def counts_of(cases: Sequence[Case], size: int, draw: Callable[..., np.ndarray]) -> np.ndarray:
    """The union count by case and step, over k; all gradients drop tenfold in the middle."""
    generator = np.random.default_rng(7)
    clusters = [SimulatedCluster(case.at(_DENSITY), _NUM_ELEMENTS, size) for case in cases]
    signal = draw(generator, (_NUM_ELEMENTS,)).astype(np.float32)
    spread = np.abs(signal) if draw is layered else np.float32(1.0)
    counts = np.zeros((len(cases), _NUM_STEPS))
    for step in range(_NUM_STEPS):
        scale = np.float32(0.1 if step >= _DROP_AT else 1.0)
        # what all ranks see alike, and as much noise of their own
        noise = generator.standard_normal((size, _NUM_ELEMENTS), np.float32)
        noise *= scale * spread
        noise += scale * signal
        for row, cluster in zip(counts, clusters, strict=True):
            row[step] = cluster.synchronize([*noise.copy()])[0].indices.size
    assert all(cluster.buckets[0].last.num_target == _TARGET for cluster in clusters)
    return counts / _TARGET


@pytest.mark.slow
@pytest.mark.parametrize("draw", [gaussian, laplace, layered])
@pytest.mark.parametrize("size", [2, 8])
def test_union_count_stays_near_target(draw: Any, size: int) -> None:
    """Of every rule that promises it: drawing the numbers takes longer than selecting them."""
    cases = [case for case in CASES if case.count_band and case.recipe.sparsifier.quantum == 1]
    for case, counts in zip(cases, counts_of(cases, size, draw), strict=True):
        band = case.count_band
        assert isinstance(band, CountBand)
        assert band.from_target <= _TARGET
        assert 1.0 / band.first <= counts[0] <= band.first, case_id(case)
        assert np.abs(counts[4:] - 1.0).mean() <= band.settled, case_id(case)


@pytest.mark.parametrize("name", ["micro", "exdyna"])
@pytest.mark.parametrize(
    ("size", "num_elements", "k"), [(8, 64, 1), (16, 64, 1), (8, 300, 2), (4, 64, 4), (8, 64, 9)]
)
@pytest.mark.parametrize("changing", [True, False])
def test_few_elements_are_as_many_as_promised_on_average(
    name: str, size: int, num_elements: int, k: int, changing: bool
) -> None:
    """Where every rank's own part of k would be less than one element, or a few."""
    generator, num_steps = np.random.default_rng(k), 240
    cluster = SimulatedCluster(recipe(name, density=k / num_elements), num_elements, size)
    gradients, union = generator.standard_normal((size, num_elements), np.float32), 0
    for _ in range(num_steps):
        if changing:
            gradients = generator.standard_normal((size, num_elements), np.float32)
        union += cluster.synchronize([*gradients.copy()])[0].indices.size
    assert abs(union / (k * num_steps) - 1) < 0.06
