"""Law 8, NaN and Inf: every rank raises, says where, loses nothing finite, and can go on."""

import dataclasses
import pickle

import numpy as np
import pytest

from horovod_sparse.arrays import GradientParts
from horovod_sparse.errors import NonFiniteGradientError, NonFiniteSumError
from horovod_sparse.feedback import ErrorFeedback, Member
from horovod_sparse.simulation import SimulatedCluster, run_lockstep
from support import laws
from support.cases import CASES, Case, case_id
from support.gradients import DTYPES
from support.history import Scenario, random_gradients, run
from support.sampling import rows_by

rows = pytest.mark.parametrize("case", CASES, ids=case_id)

_SCENARIO = Scenario(3, 120, num_steps=6)
_MEMBERS = (Member("conv.weight", 0, 40), Member("conv.bias", 40, 50), Member("head.weight", 50, 120))
_SICK_STEP = 3


def cluster_of(case: Case, scenario: Scenario) -> SimulatedCluster:
    cluster = scenario.cluster(case.recipe)
    for bucket in cluster.buckets:
        bucket.members = _MEMBERS
    return cluster


_SICK = {
    "one rank": ({1: [45, 7]}, np.nan),
    "two ranks": ({0: [0], 2: [119, 60]}, np.inf),
    "all ranks": ({0: [3], 1: [3], 2: [55]}, -np.inf),
}


@rows_by("case,dtype,who", CASES, DTYPES, _SICK, ids=case_id)
def test_every_rank_says_where(case: Case, dtype: str, who: str) -> None:
    sick, value = _SICK[who]
    scenario = Scenario(3, 120, dtype, num_steps=6)
    gradients = random_gradients(scenario)
    for rank, positions in sick.items():
        gradients[_SICK_STEP, rank, positions] = value
    history = run(case.recipe, scenario, gradients, cluster=cluster_of(case, scenario))

    wanted = {
        rank: next(m.name for m in _MEMBERS if m.start <= min(positions) < m.stop)
        for rank, positions in sick.items()
    }
    for result in history.steps[_SICK_STEP].results:
        assert isinstance(result, NonFiniteGradientError)
        assert result.where == wanted
        for rank, name in wanted.items():
            assert f"rank {rank}: {name}" in str(result)
        assert str(pickle.loads(pickle.dumps(result))) == str(result)
    assert [step.abandoned for step in history.steps] == [number == _SICK_STEP for number in range(6)]
    for step in history.steps:
        assert np.isfinite(step.residuals).all()
    if not case.loses_mass:  # finite values of the sick step arrive later, with everything else
        laws.nothing_is_lost(history)
    laws.replicas_agree(history)
    laws.traffic_as_declared(history)


@rows
def test_the_residual_takes_every_finite_value(case: Case) -> None:
    """After an abandoned step each rank holds its residual + gradient, bit for bit: nothing was sent.

    A bucket cannot know of the others; front ends then drop all of a bad rank's gradient (`Bucket.abandon`).
    """
    gradients = random_gradients(_SCENARIO)
    gradients[_SICK_STEP, 1, 7] = np.nan
    history = run(case.recipe, _SCENARIO, gradients)
    for rank in range(_SCENARIO.size):
        before = history.steps[_SICK_STEP - 1].residuals[rank]
        if case.loses_mass:
            before = np.zeros_like(before)
        finite = np.nan_to_num(history.gradients[_SICK_STEP, rank], nan=0.0).astype(np.float32)
        np.testing.assert_array_equal(history.steps[_SICK_STEP].residuals[rank], before + finite)


@rows
def test_the_state_is_as_before_the_step(case: Case) -> None:
    """An abandoned step teaches nothing: no threshold moves, no step is counted, no block moves."""
    gradients = random_gradients(_SCENARIO)
    cluster = run(case.recipe, _SCENARIO, gradients[:3]).cluster
    before = [bucket.state for bucket in cluster.buckets]
    gradients[3, 2, 99] = np.inf
    run(case.recipe, _SCENARIO, gradients[3:4], cluster=cluster)
    for bucket, state in zip(cluster.buckets, before, strict=True):
        assert bucket.state is state


@rows
def test_the_step_once_more_is_that_of_a_rank_without_a_gradient(case: Case) -> None:
    """What a bad rank drops leaves no trace: sums and residuals of this step and of those after it."""
    generator = np.random.default_rng(5)
    gradients = generator.integers(-64, 65, (6, 3, 120)).astype(np.float32) / 64
    cluster, twin = cluster_of(case, _SCENARIO), cluster_of(case, _SCENARIO)
    for step, given in enumerate(gradients):
        theirs = given.copy()
        if step == _SICK_STEP:
            given[1, [45, 7]], theirs[1] = np.nan, 0.0
        buckets = cluster.buckets
        parts = [GradientParts([gradient]) for gradient in given]
        steps = [bucket.step(part) for bucket, part in zip(buckets, parts, strict=True)]
        found = run_lockstep(steps, keep_errors=True)
        if step == _SICK_STEP:
            assert all(isinstance(error, NonFiniteGradientError) for error in found)
            for rank, bucket in enumerate(buckets):
                bucket.abandon(drop=rank == 1, again=True)
            found = run_lockstep([bucket.again() for bucket in buckets])
        # what a dropped gradient was added to comes back to the rounding of that sum
        np.testing.assert_allclose(cluster.dense(found[0]), twin.step(theirs.copy()), rtol=0, atol=1e-5)
        np.testing.assert_allclose(cluster.residuals(), twin.residuals(), rtol=0, atol=1e-5)


@rows
def test_a_step_can_be_abandoned_after_it_went_well(case: Case) -> None:
    """The front end may drop a step that another bucket made worthless."""
    gradients = random_gradients(_SCENARIO)
    history = run(case.recipe, _SCENARIO, gradients[:3])
    before = [bucket.state.step for bucket in history.cluster.buckets]
    for bucket in history.cluster.buckets:
        bucket.abandon()
    for rank, residual in enumerate(history.cluster.residuals()):
        carried = history.steps[1].residuals[rank] * (not case.loses_mass)
        np.testing.assert_array_equal(residual, carried + gradients[2, rank].astype(np.float32))
    assert [bucket.state.step for bucket in history.cluster.buckets] == [step - 1 for step in before]
    for bucket in history.cluster.buckets:
        bucket.abandon()  # a second time changes nothing
    assert [bucket.state.step for bucket in history.cluster.buckets] == [step - 1 for step in before]


@pytest.mark.parametrize("case", [case for case in CASES if not case.loses_mass], ids=case_id)
def test_learning_rate_of_an_abandoned_step_counts_once(case: Case) -> None:
    """The residual is rescaled when the learning rate changes: once, also if that step is abandoned."""
    scaled = dataclasses.replace(case.recipe, feedback=ErrorFeedback(scale_residual=True))
    cluster = SimulatedCluster(scaled, 64, 2)
    first = np.arange(1, 65, dtype=np.float32) / 64
    cluster.synchronize([first.copy(), first.copy()], 0.5)
    held = cluster.residuals()
    assert np.any(held)
    sick = np.zeros(64, np.float32)
    sick[5] = np.nan
    cluster.synchronize([sick, np.zeros(64, np.float32)], 0.25, keep_errors=True)
    for before, after in zip(held, cluster.residuals(), strict=True):
        np.testing.assert_array_equal(after, 2.0 * before)
    results = cluster.synchronize(list(np.zeros((2, 64), np.float32)), 0.25)
    total = cluster.dense(results[0]) + np.sum(cluster.residuals(), axis=0)
    rounding = 1e-7 if case.quantizes else 0.0  # of what is sent of an element because of others
    np.testing.assert_allclose(total, 2.0 * np.sum(held, axis=0), rtol=0, atol=rounding)


@rows_by("case,huge", CASES, [("float32", 3e38), ("float64", 1.5e308), ("float16", 6e4)], ids=case_id)
def test_a_sum_that_is_not_finite_is_applied_by_nobody(case: Case, huge: tuple[str, float]) -> None:
    """Every rank's gradient is finite, and what all of them together send is more than its type holds."""
    dtype, value = huge
    scenario = Scenario(3, 120, dtype, num_steps=6)
    gradients = random_gradients(scenario)
    gradients[_SICK_STEP, :, [7, 45, 46]] = value
    history = run(case.recipe, scenario, gradients, cluster=cluster_of(case, scenario))
    limit = float(np.finfo(dtype).max)
    for number, step in enumerate(history.steps):
        assert np.isfinite(step.residuals).all()
        first, *others = step.results
        if isinstance(first, Exception):
            assert isinstance(first, NonFiniteSumError) and number >= _SICK_STEP
            assert first.parameter in ("conv.weight", "conv.bias") and not first.where
            assert [str(other) for other in others] == [str(first)] * len(others)
            assert str(pickle.loads(pickle.dumps(first))) == str(first)
        else:
            assert np.abs(history.dense(number)).max() / scenario.size <= limit
    sparsifier = case.recipe.sparsifier
    sums = sparsifier.name in ("exdyna", "micro", "cltk", "gtopk", "topk_dsa")  # others divide, then add up
    if dtype != "float16" and sums and sparsifier.wire.exact:  # codecs give the largest number that they have
        assert history.steps[_SICK_STEP].abandoned
    if not case.loses_mass and dtype == "float16":  # otherwise what is applied is lost beside these numbers
        laws.nothing_is_lost(history)
