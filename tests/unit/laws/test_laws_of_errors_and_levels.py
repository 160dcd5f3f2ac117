"""Law 8, NaN and Inf, and the laws with two levels: dense within a host, sparse between hosts."""

import dataclasses
import math
import pickle

import numpy as np
import pytest

from horovod_sparse.errors import EditedGradientError, NonFiniteGradientError, NonFiniteSumError
from horovod_sparse.feedback import ErrorFeedback, recipe
from horovod_sparse.simulation import SimulatedCluster, run_lockstep
from horovod_sparse.topology import Topology
from support import laws
from support.cases import CASES, Case, case_id
from support.gradients import DTYPES, dyadic, layered
from support.laws import History, Scenario, random_gradients, run
from support.sampling import rows_by

rows = pytest.mark.parametrize("case", CASES, ids=case_id)

_SCENARIO = Scenario(3, 120, num_steps=6)
_SICK_STEP = 3


def members(num_elements: int) -> dict[str, tuple[int, int]]:
    return {"conv.weight": (0, 40), "conv.bias": (40, 50), "head.weight": (50, num_elements)}


def parameter_at(position: int) -> str:
    return next(name for name, (start, stop) in members(1000).items() if start <= position < stop)


def run_with_members(case: Case, scenario: Scenario, gradients: np.ndarray) -> History:
    cluster = scenario.cluster(case.recipe)
    for bucket in cluster.buckets:
        bucket.members = members(scenario.num_elements)
    return run(case.recipe, scenario, gradients, cluster=cluster)


_SICK = {
    "one rank": ({1: [45, 7]}, np.nan),
    "two ranks": ({0: [0], 2: [119, 60]}, np.inf),
    "all ranks": ({0: [3], 1: [3], 2: [55]}, -np.inf),
}


@rows_by("case,dtype,who", CASES, DTYPES, _SICK, ids=case_id)
def test_every_rank_names_the_parameter_that_is_not_finite(case: Case, dtype: str, who: str) -> None:
    sick, value = _SICK[who]
    scenario = Scenario(3, 120, dtype, num_steps=6)
    gradients = random_gradients(scenario)
    for rank, positions in sick.items():
        gradients[_SICK_STEP, rank, positions] = value
    history = run_with_members(case, scenario, gradients)

    wanted = {rank: parameter_at(min(positions)) for rank, positions in sick.items()}
    for result in history.steps[_SICK_STEP].results:
        assert isinstance(result, NonFiniteGradientError)
        assert result.where == wanted
        for rank, name in wanted.items():
            assert f"rank {rank}: {name}" in str(result)
        assert str(pickle.loads(pickle.dumps(result))) == str(result)
    assert [step.abandoned for step in history.steps] == [number == _SICK_STEP for number in range(6)]
    assert {bucket.state.step for bucket in history.cluster.buckets} == {5}
    for step in history.steps:
        assert np.isfinite(step.residuals).all()
    # nothing was sent: bit for bit residual + gradient, of which a bucket keeps every finite value
    before, after = (np.array(history.steps[number].residuals) for number in (_SICK_STEP - 1, _SICK_STEP))
    finite = np.nan_to_num(history.gradients[_SICK_STEP], nan=0, posinf=0, neginf=0).astype(after.dtype)
    np.testing.assert_array_equal(after, before * (not case.loses_mass) + finite)
    if not case.loses_mass:  # finite values of the sick step arrive later, with everything else
        laws.nothing_is_lost(history)
    laws.replicas_agree(history)
    laws.traffic_as_declared(history)


@rows
def test_a_step_can_be_abandoned_after_it_went_well(case: Case) -> None:
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


@rows_by("case,huge", CASES, [("float32", 3e38), ("float64", 1.5e308), ("float16", 6e4)], ids=case_id)
def test_a_sum_that_is_not_finite_is_applied_by_nobody(case: Case, huge: tuple[str, float]) -> None:
    dtype, value = huge
    scenario = Scenario(3, 120, dtype, num_steps=6)
    gradients = random_gradients(scenario)
    gradients[_SICK_STEP, :, [7, 45, 46]] = value
    history = run_with_members(case, scenario, gradients)
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


#: N, L, n: not divisible by L, fewer elements than ranks of a host, shards without an element
_SHAPES = (
    *((1, 2, 41), (2, 1, 41), (2, 2, 1), (2, 2, 41), (2, 2, 1000)),
    *((3, 2, 2), (3, 2, 1001), (2, 4, 3), (2, 4, 1002)),
)


def scenario_of(hosts: int, per_host: int, num_elements: int, **more: object) -> Scenario:
    return Scenario(hosts * per_host, num_elements, hosts=hosts, **more)  # type: ignore[arg-type]


@rows_by("case,shape", CASES, _SHAPES, ids=case_id)
def test_all_laws_hold_with_two_levels(case: Case, shape: tuple[int, int, int]) -> None:
    scenario = scenario_of(*shape)
    is_small = scenario.num_elements < 1000
    gradients = random_gradients(scenario, dyadic if is_small else layered)
    laws.check_all(run(case.recipe, scenario, gradients), case, exactly=is_small)


@rows
def test_two_levels_are_hosts_of_one_rank_with_sums_and_shards(case: Case) -> None:
    scenario = scenario_of(3, 2, 400)
    gradients = random_gradients(scenario, dyadic)
    history = run(case.recipe, scenario, gradients)
    for local in range(2):
        shard = slice(200 * local, 200 * (local + 1))
        cluster = SimulatedCluster(case.recipe, 200, 3, name=f"bucket/{local}")
        for number, step in enumerate(gradients):
            of_hosts = step.reshape(3, 2, 400).sum(1)[:, shard].astype(np.float32)
            wanted = cluster.step([*of_hosts])
            found = history.cluster.dense(history.steps[number].sums[0])[shard]
            np.testing.assert_array_equal(found, wanted)


@rows_by("case,position", CASES, [3, 45, 119], ids=case_id)
def test_every_rank_of_every_host_names_the_parameter_that_is_not_finite(case: Case, position: int) -> None:
    scenario = scenario_of(3, 2, 121, num_steps=5)
    gradients = random_gradients(scenario)
    gradients[_SICK_STEP, 3, position] = np.nan
    history = run_with_members(case, scenario, gradients)
    for result in history.steps[_SICK_STEP].results:
        assert isinstance(result, NonFiniteGradientError)
        assert result.where == dict.fromkeys((2, 3), parameter_at(position)), (
            "the ranks of the host whose sum is not finite"
        )
        assert "one of ranks 2, 3 of a host: " in str(result), "which of them nobody has seen"
    assert [step.abandoned for step in history.steps] == [number == _SICK_STEP for number in range(5)]
    laws.replicas_agree(history)
    laws.traffic_as_declared(history)
    if not case.loses_mass:
        gradients[_SICK_STEP, 2:4, position] = 0.0  # what is not finite counts as 0: of the host's sum
        healthy = dataclasses.replace(history, gradients=gradients)
        laws.nothing_is_lost(healthy)


def test_a_rank_that_refuses_is_known_to_all() -> None:
    cluster = SimulatedCluster(recipe("topk", density=0.1), 3, 8, topology=Topology.regular(2, 4))
    steps = [
        bucket.step(np.ones(3, np.float32), mark_cancelled=rank == 7)  # whose shard has no element
        for rank, bucket in enumerate(cluster.buckets)
    ]
    for result in run_lockstep(steps, keep_errors=True, topology=cluster.topology):
        assert isinstance(result, EditedGradientError) and [*result.where] == [7]


def test_a_hosts_sum_that_is_not_finite_is_applied_by_nobody() -> None:
    cluster = SimulatedCluster(recipe("exdyna", density=0.5), 6, 4, topology=Topology.regular(2, 2))
    large = np.array([1, 1, 1, 1, 3e38, 1], np.float32)
    nothing = np.zeros(6, np.float32)
    given = [large.copy(), nothing.copy(), large.copy(), nothing.copy()]
    for result in cluster.synchronize(given, keep_errors=True):
        assert isinstance(result, NonFiniteSumError) and result.parameter == "bucket"
    np.testing.assert_array_equal(np.sum(cluster.residuals(), 0, np.float64), 2 * large.astype(np.float64))


def test_parameters_without_a_gradient_lose_nothing_of_others_with_two_levels() -> None:
    cluster = SimulatedCluster(recipe("topk", density=0.25), 8, 4, topology=Topology.regular(2, 2))
    given = np.array([0, 0, 0, 0, 1, 2, 3, 4], np.float32)
    steps = [bucket.step(given, absent=[(0, 4)]) for bucket in cluster.buckets]
    total = cluster.dense(run_lockstep(steps, topology=cluster.topology)[0])
    for bucket in cluster.buckets:
        bucket.accept()
    np.testing.assert_array_equal(total + np.sum(cluster.residuals(), 0), 4 * given)


def test_a_clipped_step_has_at_most_the_norm_that_was_asked_for() -> None:
    made = recipe("topk", density=1.0, feedback=ErrorFeedback(clip_norm=2.0))
    cluster = SimulatedCluster(made, 64, 4, topology=Topology.regular(2, 2))
    total = cluster.step([np.ones(64, np.float32) for _ in range(4)])
    # two hosts, each clipped to 2 / sqrt(2), that agree
    assert np.linalg.norm(total) == pytest.approx(2 * 2.0 / math.sqrt(2))
    assert cluster.buckets[0].recipe.feedback.clip_norm == pytest.approx(2.0 / math.sqrt(2))  # type: ignore[attr-defined]


@rows
def test_a_step_that_is_taken_back_leaves_what_was_there(case: Case) -> None:
    scenario = scenario_of(2, 2, 121, num_steps=_SICK_STEP + 1)
    gradients = random_gradients(scenario, dyadic)
    gradients[_SICK_STEP, 0, 7] = np.inf
    history = run_with_members(case, scenario, gradients)
    before = np.array(history.steps[_SICK_STEP - 1].residuals)
    if case.loses_mass:
        before[:] = 0.0
    for bucket in history.cluster.buckets[:2]:
        bucket.abandon(drop=True)
    after = np.array(history.cluster.residuals())
    if case.stays_dyadic:
        np.testing.assert_array_equal(after[:2], before[:2])
    if not case.loses_mass and case.stays_dyadic:
        np.testing.assert_array_equal(after[2:].sum(0), before[2:].sum(0) + gradients[_SICK_STEP, 2:].sum(0))
