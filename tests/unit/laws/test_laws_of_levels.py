"""The laws with two levels: dense within a host, sparse between hosts. A host is what a rank is otherwise."""

import dataclasses
import math

import numpy as np
import pytest

from horovod_sparse.arrays import GradientParts
from horovod_sparse.errors import EditedGradientError, NonFiniteGradientError, NonFiniteSumError
from horovod_sparse.feedback import ErrorFeedback, Member, MomentumCorrection, recipe
from horovod_sparse.simulation import SimulatedCluster, run_lockstep
from horovod_sparse.topology import Topology
from support import laws
from support.cases import CASES, Case, case_id
from support.gradients import dyadic, gaussian, layered
from support.history import History, Scenario, random_gradients, run
from support.sampling import rows_by

rows = pytest.mark.parametrize("case", CASES, ids=case_id)

#: N, L, n: not divisible by L, fewer elements than ranks of a host, shards without an element
_SHAPES = (
    *((1, 2, 41), (2, 1, 41), (2, 2, 1), (2, 2, 41), (2, 2, 1000)),
    *((3, 2, 2), (3, 2, 1001), (2, 4, 3), (2, 4, 1002)),
)


def scenario_of(hosts: int, per_host: int, num_elements: int, **more: object) -> Scenario:
    return Scenario(hosts * per_host, num_elements, hosts=hosts, **more)  # type: ignore[arg-type]


@rows_by("case,shape", CASES, _SHAPES, ids=case_id)
def test_all_laws_hold(case: Case, shape: tuple[int, int, int]) -> None:
    scenario = scenario_of(*shape)
    draw = layered if scenario.num_elements >= 1000 else gaussian
    laws.check_all(run(case.recipe, scenario, random_gradients(scenario, draw)), case)


@rows
def test_it_is_what_hosts_of_one_rank_do_with_sums_and_shards(case: Case) -> None:
    """Shard by shard, bit for bit: the sparsifier sees a bucket of N ranks, with their hosts' sums."""
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


_MEMBERS = (Member("conv.weight", 0, 40), Member("conv.bias", 40, 50), Member("head.weight", 50, 121))
_SICK = 2


def sick_run(
    case: Case, gradients: np.ndarray, dtype: str = "float32", hosts: int = 3
) -> tuple[History, list[object]]:
    scenario = scenario_of(hosts, 2, 121, dtype=dtype, num_steps=len(gradients))
    cluster = scenario.cluster(case.recipe)
    for bucket in cluster.buckets:
        bucket.members = _MEMBERS
    history = run(case.recipe, scenario, gradients, cluster=cluster)
    return history, list(history.steps[_SICK].results)


@rows_by("case,position", CASES, [3, 45, 119], ids=case_id)
def test_every_rank_of_every_host_says_where(case: Case, position: int) -> None:
    """Only one column sees it; all ranks raise, and the host goes on with what it had."""
    gradients = random_gradients(scenario_of(3, 2, 121, num_steps=5))
    gradients[_SICK, 3, position] = np.nan
    history, results = sick_run(case, gradients)
    wanted = next(member.name for member in _MEMBERS if member.start <= position < member.stop)
    for result in results:
        assert isinstance(result, NonFiniteGradientError)
        assert result.where == {2: wanted, 3: wanted}, "the ranks of the host whose sum is not finite"
        assert "one of ranks 2, 3 of a host: " in str(result), "which of them nobody has seen"
    assert [step.abandoned for step in history.steps] == [number == _SICK for number in range(5)]
    laws.replicas_agree(history)
    laws.traffic_as_declared(history)
    if not case.loses_mass:
        gradients[_SICK, 2:4, position] = 0.0  # what is not finite counts as 0: of the host's sum
        healthy = dataclasses.replace(history, gradients=gradients)
        laws.nothing_is_lost(healthy)


@rows
def test_the_step_once_more_leaves_the_sick_host_out(case: Case) -> None:
    """As if all of its ranks had had zeros: sums of this step and of those after it."""
    generator = np.random.default_rng(5)
    gradients = generator.integers(-64, 65, (5, 4, 121)).astype(np.float32) / 64
    cluster, twin = (scenario_of(2, 2, 121).cluster(case.recipe) for _ in range(2))
    for step, given in enumerate(gradients):
        theirs = given.copy()
        if step == _SICK:
            given[1, 45], theirs[:2] = np.nan, 0.0
        found = cluster.synchronize([GradientParts([one]) for one in given], keep_errors=True)
        if step == _SICK:
            assert all(isinstance(error, NonFiniteGradientError) for error in found)
            for rank, bucket in enumerate(cluster.buckets):
                bucket.abandon(drop=rank in found[0].where, again=True)
            again = [bucket.again() for bucket in cluster.buckets]
            found = run_lockstep(again, topology=cluster.topology)
        np.testing.assert_allclose(cluster.dense(found[0]), twin.step([*theirs]), rtol=0, atol=1e-5)


def test_a_rank_that_refuses_is_known_to_all() -> None:
    cluster = SimulatedCluster(recipe("topk", density=0.1), 3, 8, topology=Topology.regular(2, 4))
    steps = [
        bucket.step(np.ones(3, np.float32), refused=rank == 7)  # whose shard has no element
        for rank, bucket in enumerate(cluster.buckets)
    ]
    for result in run_lockstep(steps, keep_errors=True, topology=cluster.topology):
        assert isinstance(result, EditedGradientError) and [*result.where] == [7]


def test_a_sum_that_is_not_finite_is_applied_by_nobody() -> None:
    cluster = SimulatedCluster(recipe("exdyna", density=0.5), 6, 4, topology=Topology.regular(2, 2))
    large = np.array([1, 1, 1, 1, 3e38, 1], np.float32)
    nothing = np.zeros(6, np.float32)
    given = [large.copy(), nothing.copy(), large.copy(), nothing.copy()]
    for result in cluster.synchronize(given, keep_errors=True):
        assert isinstance(result, NonFiniteSumError) and result.parameter == "bucket"
    np.testing.assert_array_equal(np.sum(cluster.residuals(), 0, np.float64), 2 * large.astype(np.float64))


def test_a_clipped_step_has_at_most_the_norm_that_was_asked_for() -> None:
    feedback = ErrorFeedback(clip_norm=2.0)
    cluster = SimulatedCluster(
        recipe("topk", density=1.0, feedback=feedback), 64, 4, topology=Topology.regular(2, 2)
    )
    even = np.ones(64, np.float32)
    total = cluster.step([even.copy() for _ in range(4)])
    # two hosts, each clipped to 2 / sqrt(2), that agree
    assert np.linalg.norm(total) == pytest.approx(2 * 2.0 / math.sqrt(2))
    assert cluster.buckets[0].recipe.feedback.clip_norm == pytest.approx(2.0 / math.sqrt(2))  # type: ignore[attr-defined]


def test_momentum_correction_is_that_of_sums() -> None:
    described = recipe("topk", density=1.0, feedback=MomentumCorrection(momentum=0.5, masking=False))
    flat = SimulatedCluster(described, 33, 4)
    two = SimulatedCluster(described, 33, 4, topology=Topology.regular(2, 2))
    for step in dyadic(np.random.default_rng(3), (4, 4, 33)).astype(np.float32):
        np.testing.assert_array_equal(two.step([*step.copy()]), flat.step([*step.copy()]))


@rows
def test_a_step_that_is_taken_back_leaves_what_was_there(case: Case) -> None:
    """All columns take it back, also those that have found nothing; dropped is the sick host's gradient."""
    gradients = random_gradients(scenario_of(2, 2, 121, num_steps=3), dyadic)
    gradients[_SICK, 0, 7] = np.inf
    history, _ = sick_run(case, gradients, hosts=2)
    before = np.array(history.steps[_SICK - 1].residuals)
    if case.loses_mass:
        before[:] = 0.0
    for bucket in history.cluster.buckets[:2]:
        bucket.abandon(drop=True)
    after = np.array(history.cluster.residuals())
    if case.stays_dyadic:
        np.testing.assert_array_equal(after[:2], before[:2])
    if not case.loses_mass and case.stays_dyadic:
        np.testing.assert_array_equal(after[2:].sum(0), before[2:].sum(0) + gradients[_SICK, 2:].sum(0))
