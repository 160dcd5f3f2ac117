"""Law 6, where ranks cannot go on from equal states: all start anew at the training's step."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from horovod_sparse.feedback import parse_recipe, resumed
from horovod_sparse.simulation import SimulatedCluster
from support import laws
from support.cases import CASES, Case, case_id
from support.gradients import dyadic
from support.history import Scenario, random_gradients, run

_NUM_STEPS = 3


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_states_that_start_anew_in_the_middle_agree_and_lose_nothing(case: Case, size: int) -> None:
    """As where rank 1 is replaced: it has neither residual nor state, the others go on at their step."""
    scenario = Scenario(size, 60, num_steps=_NUM_STEPS)
    before = run(case.recipe, scenario, random_gradients(scenario, dyadic))
    cluster = run(case.recipe, scenario, random_gradients(scenario, dyadic, seed=1)).cluster
    told = before.cluster.buckets[0].progress
    for rank, (fresh, old) in enumerate(zip(cluster.buckets, before.cluster.buckets, strict=True)):
        zeros = np.zeros(scenario.num_elements, fresh.info.value_dtype)
        fresh.accumulator.assign(zeros if rank == 1 else old.accumulator.values())
        for mine, theirs in zip(fresh.accumulator.companions, old.accumulator.companions, strict=True):
            mine[:] = 0.0 if rank == 1 else theirs
        own = dataclasses.replace(old.progress, step=0 if rank == 1 else old.progress.step)
        fresh.restart(resumed(own, told.to_plain(), told.step))
    residuals = [residual for rank, residual in enumerate(before.cluster.residuals()) if rank != 1]
    held = np.sum(residuals, axis=0, dtype=np.float64)
    history = run(case.recipe, scenario, random_gradients(scenario, dyadic, seed=2), cluster=cluster)
    assert [bucket.state.step for bucket in cluster.buckets] == [2 * _NUM_STEPS] * size
    laws.sums_are_right(history)
    laws.replicas_agree(history)
    if case.exclusive:
        laws.exclusive_means_exclusive(history)
    if not case.loses_mass:
        history.gradients[0, 0] += held  # what was held when they started is there as if it had just come
        laws.nothing_is_lost(history)


@pytest.mark.parametrize("name", ["micro", "exdyna"])
def test_a_first_threshold_is_in_the_units_that_the_residual_has_now(name: str) -> None:
    text = f"{name}:density=0.1,threshold=paper,feedback=error(scale_residual=true)"
    cluster, zeros = SimulatedCluster(parse_recipe(text), 100, 2), np.zeros(100, np.float32)
    first = cluster.synchronize([zeros.copy(), zeros.copy()], 1.0)[0].facts["threshold"]
    cluster.synchronize([zeros.copy(), zeros.copy()], 0.125)
    for bucket in cluster.buckets:
        bucket.restart(bucket.progress)
    again = cluster.synchronize([zeros.copy(), zeros.copy()], 0.125)[0].facts["threshold"]
    assert again == 8.0 * first
