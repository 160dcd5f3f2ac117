"""A bucket at work: feedback, norms, telemetry."""

import numpy as np
import pytest

from horovod_sparse.feedback import Recipe, recipe
from horovod_sparse.simulation import SimulatedCluster
from support.cases import CASES, Case, case_id
from support.gradients import layered
from support.history import Scenario, random_gradients


def ones(value: float, num_elements: int = 4) -> np.ndarray:
    return np.full(num_elements, value, np.float32)


def one_rank(made: Recipe) -> SimulatedCluster:
    return SimulatedCluster(made, num_elements=4, size=1)


def test_residual_follows_the_learning_rate() -> None:
    # k = 1 of 4 equal elements: index 0 goes, the others keep their gradient of 1.
    cluster = one_rank(recipe("topk", density=0.25, feedback="error(scale_residual=true)"))
    cluster.synchronize([ones(1.0)], learning_rate=0.5)
    assert cluster.residuals()[0].tolist() == [0, 1, 1, 1]
    # The rate falls from 0.5 to 0.125: what was computed under 0.5 is worth 0.5 / 0.125 = 4 gradients now.
    cluster.synchronize([ones(0.0)], learning_rate=0.125)
    assert cluster.residuals()[0].tolist() == [0, 0, 4, 4]
    # It rises to 0.25: 0.125 / 0.25 = half.
    cluster.synchronize([ones(0.0)], learning_rate=0.25)
    assert cluster.residuals()[0].tolist() == [0, 0, 0, 2]
    # The same rate again changes nothing; nor does a step that knows no rate.
    cluster.synchronize([np.array([9, 0, 0, 0], np.float32)], learning_rate=0.25)
    cluster.synchronize([np.array([9, 0, 0, 0], np.float32)])
    assert cluster.residuals()[0].tolist() == [0, 0, 0, 2]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_norms_are_those_of_the_residuals(case: Case) -> None:
    scenario = Scenario(3, 3000, num_steps=5)
    cluster = scenario.cluster(case.recipe)
    carried = [0.0, 0.0, 0.0]
    for gradients in random_gradients(scenario, layered).astype(np.float32):
        cluster.synchronize(list(gradients))
        # Eq. (1): the mean over ranks of what they held when the step began; float32 in the message
        for bucket in cluster.buckets:
            assert bucket.last.global_error == pytest.approx(float(np.mean(carried)), rel=1e-4)
        held = [float(np.linalg.norm(residual.astype(np.float64))) for residual in cluster.residuals()]
        for bucket, norm in zip(cluster.buckets, held, strict=True):
            assert bucket.last.residual_norm == pytest.approx(norm, rel=1e-4)
            assert bucket.last.fold_seconds > 0.0 and bucket.last.select_seconds > 0.0
        carried = [0.0, 0.0, 0.0] if case.loses_mass else held


def test_norms_survive_abandoning_and_loading() -> None:
    cluster = one_rank(recipe("topk", density=0.25))
    cluster.synchronize([np.array([4, 3, 0, 0], np.float32)])
    accumulator = cluster.buckets[0].accumulator
    assert accumulator.square_norm == pytest.approx(9.0)
    cluster.buckets[0].abandon()
    assert accumulator.square_norm == pytest.approx(25.0)
    accumulator.add(np.array([3], np.int32), np.array([2.0], np.float32))
    assert accumulator.square_norm == pytest.approx(29.0)
    accumulator.assign(np.array([1, 1, 1, 1], np.float32))
    assert accumulator.square_norm == pytest.approx(4.0)
    cluster.synchronize([ones(0.0)])
    assert cluster.buckets[0].last.global_error == pytest.approx(2.0)


def test_what_is_applied_is_not_taken_back() -> None:
    """As where the next step fails before its first message."""
    cluster = one_rank(recipe("topk", density=0.25))
    cluster.synchronize([np.array([4, 3, 0, 0], np.float32)])
    cluster.buckets[0].accept()
    cluster.buckets[0].abandon()
    assert cluster.residuals()[0].tolist() == [0, 3, 0, 0]
