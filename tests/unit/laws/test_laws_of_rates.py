"""Learning rates in any order: thresholds follow a scaled residual, and nothing grows without limit."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_sparse.feedback import ErrorFeedback, Recipe, recipe
from horovod_sparse.feedback.bucket import LARGEST_GROWTH
from horovod_sparse.simulation import SimulatedCluster
from support import laws
from support.cases import CASES, Case, case_id
from support.gradients import layered
from support.history import Scenario, random_gradients, run
from support.sampling import rows_by

_KEEPING = [case for case in CASES if not case.loses_mass]
_STEPS = 7
#: restarts, a warm-up from next to nothing, a cosine to 0, constant rates, one outlier
_RATES = st.lists(
    st.sampled_from((0.0, 1e-12, 1e-6, 1e-3, 0.05, 0.1, 0.5, 1.0, 100.0)), min_size=_STEPS, max_size=_STEPS
)


def scaled(case: Case) -> Recipe:
    feedback: Any = case.recipe.feedback
    return dataclasses.replace(case.recipe, feedback=dataclasses.replace(feedback, scale_residual=True))


@rows_by(
    "case,rates",
    _KEEPING,
    [[1.0, 1.0, 0.125, 0.125, 0.5, 1.0, 0.25], [0.25, 0.5, 2.0, 2.0, 0.25, 0.25, 0.5]],
    ids=case_id,
)
def test_the_residuals_scale_changes_no_selection(case: Case, rates: list[float]) -> None:
    scenario = Scenario(4, 2000, num_steps=_STEPS)
    gradients = random_gradients(scenario, layered).astype(np.float32)
    ours = run(scaled(case), scenario, gradients, rates=rates)
    # what the first step has as a threshold, where it is a number, is meant in its own units
    relative = np.array(rates) / rates[0]
    papers = run(case.recipe, scenario, gradients * relative[:, None, None])
    laws.units_change_nothing(ours, papers, relative.tolist())


@pytest.mark.parametrize("case", _KEEPING, ids=case_id)
@settings(max_examples=3, deadline=None, derandomize=True, database=None)
@given(rates=_RATES)
def test_rates_in_any_order_bound_what_is_applied(case: Case, rates: list[float]) -> None:
    scenario = Scenario(3, 40, num_steps=_STEPS)
    gradients = random_gradients(scenario)
    laws.dense_bounds(run(scaled(case), scenario, gradients, rates=rates), LARGEST_GROWTH)
    laws.dense_bounds(run(case.recipe, scenario, gradients, rates=rates), 1.0)


def test_a_rate_of_zero_is_never_the_last_one() -> None:
    cluster = SimulatedCluster(
        recipe("topk", density=0.25, feedback=ErrorFeedback(scale_residual=True)), 4, 1
    )
    for rate, held in ((0.5, 1.0), (0.125, 5.0), (0.0, 6.0), (0.5, 2.5), (float("nan"), 3.5)):
        cluster.synchronize([np.array([99, 1, 1, 1], np.float32)], rate)
        assert cluster.residuals()[0].tolist() == [0.0, *[held] * 3]
        assert cluster.buckets[0].learning_rate == (rate if rate > 0 else cluster.buckets[0].learning_rate)
    assert cluster.buckets[0].learning_rate == 0.5
