"""Gradients whose size jumps from step to step and from rank to rank, as those of small batches do."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_sparse.feedback import recipe
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.thresholds import Sketch

_NUM_ELEMENTS, _DENSITY, _SIZE, _NUM_STEPS = 400_000, 0.025, 4, 24  # k = 10 000


def mean_error(algorithm: str, rule: Sketch) -> float:
    """Mean of |count / k - 1| from step 5 on."""
    generator = np.random.default_rng(5)
    cluster = SimulatedCluster(recipe(algorithm, density=_DENSITY, threshold=rule), _NUM_ELEMENTS, _SIZE)
    errors = []
    for _ in range(_NUM_STEPS):
        sizes = np.exp(1.5 * generator.standard_normal(_SIZE)).astype(np.float32)
        gradients = [size * generator.standard_normal(_NUM_ELEMENTS, np.float32) for size in sizes]
        count = cluster.synchronize(gradients)[0].indices.size
        errors.append(abs(count / (_DENSITY * _NUM_ELEMENTS) - 1.0))
    return float(np.mean(errors[4:]))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["micro", "exdyna"])
def test_the_union_count_stays_near_target(algorithm: str) -> None:
    assert mean_error(algorithm, Sketch()) <= 0.015
    # it is the memory of the last union that keeps it there
    assert mean_error(algorithm, Sketch(memory=0.0)) > 0.03
