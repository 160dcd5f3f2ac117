"""Law 5 for threshold rules: the union count stays near k, from the first step on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from horovod_sparse.simulation import SimulatedCluster
from support.cases import CASES, Case, CountBand, case_id
from support.gradients import gaussian, laplace, layered

_NUM_ELEMENTS, _NUM_STEPS, _DROP_AT = 400_000, 24, 14
_DENSITY = 0.025  # k = 10 000, the least that the promise is made for


def counts_of(case: Case, size: int, draw: Callable[..., np.ndarray]) -> tuple[int, np.ndarray]:
    """k, and the union count of every step; all gradients drop tenfold in the middle."""
    generator = np.random.default_rng(7)
    cluster = SimulatedCluster(case.at(_DENSITY), _NUM_ELEMENTS, size)
    signal = draw(generator, (_NUM_ELEMENTS,)).astype(np.float32)
    counts = []
    for step in range(_NUM_STEPS):
        scale = 0.1 if step >= _DROP_AT else 1.0
        # what all ranks see alike, and as much noise of their own
        noise = generator.standard_normal((size, _NUM_ELEMENTS), np.float32)
        spread = np.abs(signal) if draw is layered else np.float32(1.0)
        counts.append(cluster.synchronize([scale * (signal + spread * own) for own in noise])[0].indices.size)
    return cluster.buckets[0].last.num_target, np.array(counts)


@pytest.mark.slow
@pytest.mark.parametrize("draw", [gaussian, laplace, layered])
@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.count_band and case.recipe.sparsifier.quantum == 1],
    ids=case_id,
)
def test_union_count_stays_near_target(case: Case, draw: Any, size: int) -> None:
    band = case.count_band
    assert isinstance(band, CountBand)
    target, counts = counts_of(case, size, draw)
    assert target >= band.from_target
    error = np.abs(counts / target - 1.0)
    assert 1.0 / band.first <= counts[0] / target <= band.first
    assert error[4:].mean() <= band.settled
