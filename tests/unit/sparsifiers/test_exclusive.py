"""That no element is applied twice, whatever the states of the ranks: exclusive selections are looked at."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_sparse.errors import StateMismatchError
from horovod_sparse.feedback import recipe
from horovod_sparse.simulation import SimulatedCluster

_SIZE, _NUM_ELEMENTS = 3, 600


def _cluster(name: str) -> tuple[SimulatedCluster, np.ndarray]:
    cluster = SimulatedCluster(recipe(name, density=0.1), _NUM_ELEMENTS, _SIZE)
    generator = np.random.default_rng(1)
    for _ in range(4):
        cluster.step(list(generator.standard_normal((_SIZE, _NUM_ELEMENTS)).astype(np.float32)))
    return cluster, generator.standard_normal((_SIZE, _NUM_ELEMENTS)).astype(np.float32)


@pytest.mark.parametrize("name", ["exdyna", "micro"])
@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_that_is_a_step_behind_is_found_out_by_all(name: str, late: int) -> None:
    cluster, gradients = _cluster(name)
    cluster.buckets[late].state.step -= 1
    before = cluster.residuals()
    ends = cluster.synchronize([given.copy() for given in gradients], keep_errors=True)
    assert [type(end) for end in ends] == [StateMismatchError] * _SIZE
    assert len({str(end) for end in ends}) == 1
    assert f"{late} " in str(ends[0]) and "in one another's parts" in str(ends[0])
    for bucket, residual, given in zip(cluster.buckets, before, gradients, strict=True):
        bucket.abandon()
        np.testing.assert_array_equal(bucket.accumulator.residual(), residual + given)


@pytest.mark.parametrize("blocks", [(5, -5, 0), (0, 6, -6)])
def test_other_bounds_on_one_rank_are_found_out_by_all(blocks: tuple[int, ...]) -> None:
    """Where the selections themselves do not meet, nothing is applied twice."""
    found = 0
    for rank in range(_SIZE):
        cluster, gradients = _cluster("exdyna")
        cluster.buckets[rank].state.partitions.num_blocks += np.array(blocks)
        ends = cluster.synchronize(list(gradients), keep_errors=True)
        errors = [end for end in ends if isinstance(end, StateMismatchError)]
        assert len(errors) in (0, _SIZE)
        found += bool(errors)
        if not errors:
            assert np.unique(ends[0].indices).size == ends[0].indices.size
    assert found
