"""A rank that has done another number of steps is met with an error on every rank, by every algorithm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from horovod_sparse.errors import CollectiveMismatchError, HorovodSparseError, StateMismatchError
from horovod_sparse.simulation import SimulatedCluster
from support.cases import CASES, Case, case_id

SIZE, NUM_ELEMENTS = 4, 400


def stepped(case: Case, dtype: str, num_steps: int) -> SimulatedCluster:
    cluster = SimulatedCluster(case.recipe, NUM_ELEMENTS, SIZE, dtype)
    for step in range(num_steps):
        cluster.step(gradients(step, dtype))
    return cluster


def gradients(step: int, dtype: str = "float32") -> list[np.ndarray]:
    return list(np.random.default_rng(step).standard_normal((SIZE, NUM_ELEMENTS)).astype(dtype))


@pytest.mark.parametrize("case", CASES, ids=case_id)
@pytest.mark.parametrize("by", [1, 2, 3])
def test_a_rank_behind_is_an_error_on_every_rank(case: Case, by: int) -> None:
    cluster = stepped(case, "float32", 5)
    before = cluster.residuals()
    cluster.buckets[2].state.step -= by
    try:
        found = cluster.synchronize(gradients(5), keep_errors=True)
    except CollectiveMismatchError:  # in other rounds already: Horovod itself, or the deadline, says so
        return
    assert all(isinstance(error, HorovodSparseError) for error in found), found
    kinds: set[Any] = {type(error) for error in found}
    assert len(kinds) == 1
    if kinds == {StateMismatchError} and "modulo 8" in str(found[0]):
        assert f"ranks [0, 1, 3] at 5, ranks [2] at {5 - by}" in str(found[0])
        for bucket, held, given in zip(cluster.buckets, before, gradients(5), strict=True):
            if not case.loses_mass and case.recipe.feedback.num_companions == 0:
                np.testing.assert_array_equal(bucket.accumulator.values(), held + given)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_many_steps_of_ranks_that_stay_together(case: Case) -> None:
    cluster = stepped(case, "float64", 10)
    assert [bucket.state.step for bucket in cluster.buckets] == [10] * SIZE
