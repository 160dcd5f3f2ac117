"""Momentum correction and clipping, against the equations written out."""

from typing import Any

import numpy as np
import pytest

from horovod_sparse.arrays import FoldRule, HostAccumulator
from horovod_sparse.errors import NonFiniteGradientError
from horovod_sparse.feedback import (
    ErrorFeedback,
    MomentumCorrection,
    NoFeedback,
    Recipe,
    parse_recipe,
    recipe,
)
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.sparsifiers import TopK
from support.gradients import DTYPES, as_gradient, dyadic, wide
from support.history import Scenario, run
from support.reference import ReferenceAccumulator
from support.sampling import rows_by

_P, _N, _K = 3, 40, 4


def by_the_equations(
    gradients: np.ndarray, momentum: float, nesterov: bool, masking: bool
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Sums of every step, residuals and velocities at the end: Lin et al. 2018, Eqs. (4), (5) and (9)."""
    residual, velocity = np.zeros((_P, _N)), np.zeros((_P, _N))
    sums = []
    for step in gradients:
        velocity = momentum * velocity + step
        residual = residual + (step + momentum * velocity if nesterov else velocity)
        total = np.zeros(_N)
        for rank in range(_P):
            sent = np.argsort(-np.abs(residual[rank]), kind="stable")[:_K]
            total[sent] += residual[rank, sent]
            residual[rank, sent] = 0
            if masking:
                velocity[rank, sent] = 0
        sums.append(total)
    return sums, residual, velocity


@pytest.mark.parametrize("memory", [HostAccumulator, ReferenceAccumulator])
@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
def test_the_equations(memory: type, nesterov: bool, masking: bool) -> None:
    gradients = dyadic(np.random.default_rng(1), (8, _P, _N))
    feedback = MomentumCorrection(momentum=0.5, nesterov=nesterov, masking=masking)
    made = Recipe(TopK(density=_K / _N), feedback)
    sums, residuals, velocities = by_the_equations(gradients, 0.5, nesterov, masking)
    history = run(made, Scenario(_P, _N, num_steps=8), gradients, memory)
    for number, expected in enumerate(sums):
        np.testing.assert_array_equal(history.dense(number), expected)  # few bits: exact
    for rank, bucket in enumerate(history.cluster.buckets):
        np.testing.assert_array_equal(bucket.accumulator.values(), residuals[rank])
        np.testing.assert_array_equal(bucket.accumulator.companions[0], velocities[rank])


@pytest.mark.parametrize("text", ["topk:density=1.0", "topk:density=0.1,schedule=linear(steps=3,start=1.0)"])
def test_nothing_is_masked_where_all_is_sent(text: str) -> None:
    """It would be SGD without momentum: at density 1, and while a schedule is there."""
    made = parse_recipe(f"{text},feedback=momentum(momentum=0.5)")
    cluster, gradients = SimulatedCluster(made, _N, 2), dyadic(np.random.default_rng(4), (1, 2, _N))
    for step in gradients:
        np.testing.assert_array_equal(cluster.step(list(step.astype(np.float32))), step.sum(0))
    for rank, bucket in enumerate(cluster.buckets):
        np.testing.assert_array_equal(bucket.accumulator.companions[0], gradients[0, rank])


@pytest.mark.parametrize("masking", [True, False])
def test_an_abandoned_step_gives_the_velocity_back(masking: bool) -> None:
    made = Recipe(TopK(density=0.1), MomentumCorrection(momentum=0.5, masking=masking))
    cluster = SimulatedCluster(made, _N, 2)
    first, second = dyadic(np.random.default_rng(3), (2, 2, _N)).astype(np.float32)
    cluster.synchronize(list(first.copy()))
    before = [bucket.accumulator.companions[0].copy() for bucket in cluster.buckets]
    sick = second.copy()
    sick[1, 7] = np.nan
    errors = cluster.synchronize(list(sick.copy()), keep_errors=True)
    assert all(isinstance(error, NonFiniteGradientError) for error in errors)
    for rank, bucket in enumerate(cluster.buckets):
        expected = 0.5 * before[rank] + np.nan_to_num(sick[rank])
        np.testing.assert_array_equal(bucket.accumulator.companions[0], expected)


def norm(values: Any) -> float:
    return float(np.linalg.norm(wide(values) if isinstance(values, np.ndarray) else values))


@rows_by("dtype,feedback", DTYPES, [ErrorFeedback, NoFeedback, MomentumCorrection])
def test_clipping_is_local_and_by_the_root_of_the_ranks(dtype: str, feedback: Any) -> None:
    # Four ranks: what one rank adds has a norm of at most 1 / sqrt(4).
    made = Recipe(TopK(density=0.01), feedback(clip_norm=1.0))
    cluster = SimulatedCluster(made, 1000, 4, dtype)
    values = np.random.default_rng(4).standard_normal((4, 1000))
    values[3] *= 1e-3  # this rank's is small enough
    given = [as_gradient(row, dtype) for row in values]
    exact = [wide(row) for row in given]
    sum_ = cluster.synchronize(given)[0]
    folded = np.array(cluster.residuals(), np.float64)
    for rank, count in enumerate(sum_.counts):
        mine = slice(int(sum_.counts[:rank].sum()), int(sum_.counts[:rank].sum() + count))
        folded[rank, sum_.indices[mine]] += sum_.values[mine]
    tolerance = {"float32": 1e-6, "float64": 1e-12, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    for rank in range(3):
        np.testing.assert_allclose(np.linalg.norm(folded[rank]), 0.5, rtol=tolerance)
        np.testing.assert_allclose(
            folded[rank], 0.5 * exact[rank] / norm(exact[rank]), rtol=tolerance, atol=1e-6
        )
    np.testing.assert_array_equal(folded[3], exact[3])


@rows_by("dtype,value", DTYPES, [np.nan, np.inf])
def test_what_is_not_finite_is_named_though_clipped(dtype: str, value: float) -> None:
    cluster = SimulatedCluster(Recipe(TopK(density=0.1), ErrorFeedback(clip_norm=1.0)), 100, 2, dtype)
    rows = np.random.default_rng(5).standard_normal((2, 100))
    rows[1, 30] = value
    given = [as_gradient(row, dtype) for row in rows]
    exact = wide(given[1])
    errors = cluster.synchronize(given, keep_errors=True)
    assert all(isinstance(error, NonFiniteGradientError) and 1 in error.where for error in errors)
    held = cluster.residuals()[1]
    # what was finite has been clipped by its own norm, and kept
    finite = np.where(np.isfinite(exact), exact, 0)
    np.testing.assert_allclose(held, finite / norm(finite) / np.sqrt(2), rtol=1e-2, atol=1e-3)
    assert held[30] == 0 and held.any()


@pytest.mark.parametrize("scale", [1e-35, 1e35, 1e200])
def test_norms_whose_squares_are_no_numbers(scale: float) -> None:
    dtype = np.float64 if scale > 1e38 else np.float32
    accumulator = HostAccumulator(100, dtype)
    gradient = (np.random.default_rng(6).standard_normal(100) * scale).astype(dtype)
    expected = gradient / float(np.linalg.norm(gradient.astype(np.float64) / scale)) / scale * (scale / 8)
    accumulator.fold(gradient, FoldRule(clip_norm=scale / 8))
    np.testing.assert_allclose(accumulator.values() / scale, expected / scale, rtol=1e-5)


def test_what_is_applied_with_momentum_follows_the_learning_rate() -> None:
    """The residual is scaled when the rate changes; the velocity, a sum of gradients, is not."""
    made = Recipe(TopK(density=0.25), MomentumCorrection(momentum=0.5, scale_residual=True))
    cluster = SimulatedCluster(made, 4, 1)
    cluster.synchronize([np.array([8, 1, 1, 1], np.float32)], 0.5)
    # held: residual (0, 1, 1, 1), velocity (0, 1, 1, 1); the rate halves: residual 2, plus velocity 0.5
    cluster.synchronize([np.array([9, 0, 0, 0], np.float32)], 0.25)
    assert cluster.residuals()[0].tolist() == [0, 2.5, 2.5, 2.5]


_PAIRWISE: list[dict[str, Any]] = [
    *({"name": "gtopk"}, {"name": "gtopk", "values": "float16"}, {"name": "oktopk"}, {"name": "topk_dsa"}),
    *({"name": "spardl"}, {"name": "spardl", "teams": "auto", "latency_seconds": 1.0}),
    {"name": "spardl", "residuals": "partial"},
]


@rows_by("arguments,masking,size", _PAIRWISE, [True, False], [2, 3, 6, 1], each=3)
def test_velocity_is_masked_where_the_own_value_left_for_good(
    arguments: dict[str, Any], masking: bool, size: int
) -> None:
    """Not where it came back, and not where another rank's value only passed through."""
    n = 60
    feedback = MomentumCorrection(momentum=0.5, masking=masking)
    cluster = SimulatedCluster(recipe(**arguments, density=0.1, feedback=feedback), n, size)
    generator, velocities = np.random.default_rng(size), np.zeros((size, n), np.float32)
    num_kept = 0
    for _ in range(5):
        gradients = dyadic(generator, (size, n)).astype(np.float32)
        residuals = np.array(cluster.residuals())
        velocities = np.float32(0.5) * velocities + gradients
        accumulators = residuals + velocities
        sum_ = cluster.synchronize(list(gradients.copy()))[0]
        applied = np.zeros(n, bool)
        applied[sum_.indices] = True
        for rank, bucket in enumerate(cluster.buckets):
            # what a rank holds at an applied index is not what it had: its own value has left it, or
            # others' have been added; only the first masks, so look where nothing else can have come
            velocity = bucket.accumulator.companions[0]
            changed = velocity != velocities[rank]
            if not masking:
                assert not changed.any()
                continue
            assert not velocity[changed].any(), "a velocity is kept or cleared"
            assert not changed[~applied].any(), "nothing was applied there"
            left = applied & (cluster.residuals()[rank] == 0) & (accumulators[rank] != 0)
            assert not velocity[left].any(), "a value has left, and its velocity with it"
            num_kept += int((velocity != 0).sum())
        velocities = np.array([bucket.accumulator.companions[0] for bucket in cluster.buckets])
    assert num_kept or not masking


def test_velocity_of_spardl_by_hand() -> None:
    """Two ranks, k = 2: what came through is masked at the rank that sent it, and what came back is not."""
    made = recipe("spardl", density=0.5, feedback=MomentumCorrection(momentum=0.5))
    cluster = SimulatedCluster(made, num_elements=4, size=2)
    # As in sparse_allreduce/test_golden.py: rank 0 sends 3 at 3, rank 1 sends 4 at 1; the sum is
    # 5 at 0 (rank 0's own) and 6 at 2 (rank 1's own). Both have their value at 3, or 1, back.
    gradients = [np.array([5, 1, 2, 3], np.float32), np.array([1, 4, 6, -1], np.float32)]
    cluster.synchronize(gradients)
    velocities = [bucket.accumulator.companions[0].tolist() for bucket in cluster.buckets]
    assert velocities == [[0, 1, 2, 3], [1, 4, 0, -1]]
