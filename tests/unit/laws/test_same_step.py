"""A rank that has done another number of steps is met with an error on every rank, by every algorithm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from horovod_sparse.errors import CollectiveMismatchError, HorovodSparseError, StateMismatchError
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.topology import Topology
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


@pytest.mark.parametrize("hosts", [(1, 4), (2, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_rank_behind_on_two_levels_is_met_by_name(case: Case, hosts: tuple[int, int]) -> None:
    """By its column, between hosts; on one host, where columns have one rank, by the others on it."""
    cluster = SimulatedCluster(case.recipe, NUM_ELEMENTS, SIZE, topology=Topology.regular(*hosts))
    for step in range(3):
        cluster.step(gradients(step))
    before = cluster.residuals()
    cluster.buckets[2].state.step -= 1
    try:
        found = cluster.synchronize(gradients(3), keep_errors=True)
    except CollectiveMismatchError:
        assert hosts != (1, 4)
        return
    assert {type(error) for error in found} == {StateMismatchError}
    column = {(1, 4): [0, 1, 3], (2, 2): [0], (4, 1): [0, 1, 3]}[hosts]
    told = all(f"ranks {column} at 3, ranks [2] at 2" in str(error) for error in found)
    exclusive = hosts == (4, 1) and all("in one another's parts" in str(error) for error in found)
    assert told or exclusive, found
    if hosts == (1, 4) and not case.loses_mass and case.recipe.feedback.num_companions == 0:
        held = sum(cluster.residuals())
        np.testing.assert_allclose(held, sum(before) + sum(gradients(3)), atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_many_steps_of_ranks_that_stay_together(case: Case) -> None:
    cluster = stepped(case, "float64", 10)
    assert [bucket.state.step for bucket in cluster.buckets] == [10] * SIZE
