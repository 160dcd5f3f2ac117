"""Learning rates in any order: thresholds follow a scaled residual, and nothing grows without limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_sparse.feedback import ErrorFeedback, Recipe, recipe
from horovod_sparse.feedback.bucket import LARGEST_GROWTH
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.thresholds import ThresholdScaling
from support import laws
from support.cases import CASES, Case, case_id
from support.gradients import layered
from support.history import Scenario, random_gradients, run

_KEEPING = [case for case in CASES if not case.loses_mass]
_STEPS = 7
#: restarts, a warm-up from next to nothing, a cosine to 0, constant rates, one outlier
_RATES = st.lists(
    st.sampled_from((0.0, 1e-12, 1e-6, 1e-3, 0.05, 0.1, 0.5, 1.0, 100.0)), min_size=_STEPS, max_size=_STEPS
)
_ORDERS = (
    [0.1, 0.1, 0.1, 1e-5, 0.0, 0.1, 0.1],
    [0.1, 0.09, 0.05, 0.01, 1e-8, 0.0, 0.1],
    [0.0, 1e-6, 0.1, 0.0, 0.0, 1e-9, 0.1],
)


def scaled(case: Case) -> Recipe:
    feedback: Any = case.recipe.feedback
    return dataclasses.replace(case.recipe, feedback=dataclasses.replace(feedback, scale_residual=True))


@pytest.mark.parametrize("case", _KEEPING, ids=case_id)
@pytest.mark.parametrize(
    "rates", [[1.0, 1.0, 0.125, 0.125, 0.5, 1.0, 0.25], [0.25, 0.5, 2.0, 2.0, 0.25, 0.25, 0.5]]
)
def test_the_residuals_scale_changes_no_selection(case: Case, rates: list[float]) -> None:
    scenario = Scenario(4, 2000, num_steps=_STEPS)
    gradients = random_gradients(scenario, layered).astype(np.float32)
    ours = run(scaled(case), scenario, gradients, rates=rates)
    # what the first step has as a threshold, where it is a number, is meant in its own units
    relative = np.array(rates) / rates[0]
    papers = run(case.recipe, scenario, gradients * relative[:, None, None])
    laws.units_change_nothing(ours, papers, relative.tolist())


@pytest.mark.parametrize("name", ["micro", "exdyna"])
@pytest.mark.parametrize("size", [1, 4])
def test_the_papers_threshold_follows_a_drop_of_the_rate(name: str, size: int) -> None:
    """With the rate, density falls; it must not leap to a hundred times what was asked for."""
    rule = ThresholdScaling(gamma=0.05)  # ten times the paper's steps: near k in a hundred
    made = recipe(name, density=0.01, threshold=rule, feedback=ErrorFeedback(scale_residual=True))
    generator = np.random.default_rng(3)
    cluster, quotients = SimulatedCluster(made, 8000, size), []
    for step in range(120):
        gradients = generator.standard_normal((size, 8000)).astype(np.float32)
        sum_ = cluster.synchronize(list(gradients), 0.1 if step < 100 else 0.01)[0]
        quotients.append(sum_.indices.size / 80)
    assert max(quotients[100:]) <= max(quotients[80:100])


def test_a_hard_threshold_follows_a_drop_of_the_rate() -> None:
    made = recipe("hard_threshold", threshold=3.0, feedback=ErrorFeedback(scale_residual=True))
    generator = np.random.default_rng(3)
    cluster, counts = SimulatedCluster(made, 10_000, 2), []
    for step in range(40):
        gradients = generator.standard_normal((2, 10_000)).astype(np.float32)
        counts.append(cluster.synchronize(list(gradients), 0.1 if step < 20 else 0.01)[0].counts[0])
    assert max(counts[20:]) <= min(counts[10:20])


@pytest.mark.parametrize("case", _KEEPING, ids=case_id)
@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(rates=_RATES)
def test_rates_in_any_order_bound_what_is_applied(case: Case, rates: list[float]) -> None:
    scenario = Scenario(3, 40, num_steps=_STEPS)
    gradients = random_gradients(scenario)
    laws.dense_bounds(run(scaled(case), scenario, gradients, rates=rates), LARGEST_GROWTH)
    laws.dense_bounds(run(case.recipe, scenario, gradients, rates=rates), 1.0)


@pytest.mark.parametrize("rates", _ORDERS)
@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_movements_are_within_a_bound_of_those_of_dense(
    rates: Sequence[float], scale: bool, momentum: float
) -> None:
    """With momentum of the optimizer, too, whose buffer outlives the step that filled it."""
    rates, generator = [0.1] * 40 + list(rates) + [0.1] * 5, np.random.default_rng(5)
    cluster = SimulatedCluster(
        recipe("topk", density=0.01, feedback=ErrorFeedback(scale_residual=scale)), 1000, 2
    )
    velocities, largest = np.zeros((2, 1000)), np.zeros(2)
    for rate in rates:
        gradients = generator.standard_normal((2, 1000)).astype(np.float32)
        dense = gradients.mean(0)
        applied = cluster.step(list(gradients), rate) / 2
        velocities = momentum * velocities + np.stack([applied, dense])
        largest = np.maximum(largest, np.abs(rate * velocities).max(1))
    sparse_moved, dense_moved = largest
    # an element waits for 100 steps at density 0.01, and random gradients add up like its square root
    assert sparse_moved <= (LARGEST_GROWTH if scale else 1.0) * 10 * dense_moved


def test_a_rate_of_zero_is_never_the_last_one() -> None:
    cluster = SimulatedCluster(
        recipe("topk", density=0.25, feedback=ErrorFeedback(scale_residual=True)), 4, 1
    )
    for rate, held in ((0.5, 1.0), (0.125, 5.0), (0.0, 6.0), (0.5, 2.5), (float("nan"), 3.5)):
        cluster.synchronize([np.array([99, 1, 1, 1], np.float32)], rate)
        assert cluster.residuals()[0].tolist() == [0.0, *[held] * 3]
        assert cluster.buckets[0].learning_rate == (rate if rate > 0 else cluster.buckets[0].learning_rate)
    assert cluster.buckets[0].learning_rate == 0.5
