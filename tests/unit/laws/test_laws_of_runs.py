"""Laws 1, 2, 4, 5 and 7 over all rows of the table, sizes and dtypes: one run, many looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from support import laws
from support.cases import CASES, Case, case_id
from support.gradients import DTYPES, dyadic, gaussian, layered
from support.history import History, Scenario, random_gradients, run
from support.reference import ReferenceAccumulator

Run = tuple[Case, History]

_RANKS = (1, 2, 3, 4, 8)
_SCENARIOS = (
    *(Scenario(size, num_elements) for size in _RANKS for num_elements in (1, 5, 40, 1000)),
    *(Scenario(3, 1000, dtype) for dtype in DTYPES if dtype != "float32"),
    Scenario(4, 100_000, num_steps=3),
)


def runs(which: Callable[[Case], bool] = lambda case: True) -> list[Any]:
    """Rows times scenarios, with readable names."""
    return [
        pytest.param((case, scenario), id=f"{case_id(case)}-{scenario}")
        for case in CASES
        if which(case)
        for scenario in _SCENARIOS
    ]


@pytest.fixture(scope="session", params=runs())
def lawful_run(request: Any) -> Run:
    """A case and what came of it; a session fixture, so that all laws look at one run before the next."""
    case, scenario = request.param
    draw = layered if scenario.num_elements >= 1000 else gaussian
    return case, run(case.recipe, scenario, random_gradients(scenario, draw))


def test_sums_are_well_formed(lawful_run: Run) -> None:
    laws.sums_are_right(lawful_run[1])


@pytest.mark.parametrize("lawful_run", runs(lambda case: not case.loses_mass), indirect=True)
def test_law_1_nothing_is_lost(lawful_run: Run) -> None:
    laws.nothing_is_lost(lawful_run[1])


@pytest.mark.parametrize("lawful_run", runs(lambda case: case.loses_mass), indirect=True)
def test_law_1_without_feedback_holds_within_a_step(lawful_run: Run) -> None:
    laws.nothing_is_lost_within_a_step(lawful_run[1])


def test_law_2_replicas_agree(lawful_run: Run) -> None:
    laws.replicas_agree(lawful_run[1])


@pytest.mark.parametrize("lawful_run", runs(lambda case: case.exclusive), indirect=True)
def test_law_4_exclusive_means_exclusive(lawful_run: Run) -> None:
    laws.exclusive_means_exclusive(lawful_run[1])


@pytest.mark.parametrize("lawful_run", runs(lambda case: case.exact_count), indirect=True)
def test_law_5_counts_are_exact(lawful_run: Run) -> None:
    case, history = lawful_run
    laws.counts_as_promised(history, case)


def test_law_7_traffic_is_as_declared(lawful_run: Run) -> None:
    laws.traffic_as_declared(lawful_run[1])


def test_the_plain_memory_gives_the_same_bits(lawful_run: Run) -> None:
    case, fast = lawful_run
    plain = run(case.recipe, fast.scenario, fast.gradients, ReferenceAccumulator)
    for step, other in zip(fast.steps, plain.steps, strict=True):
        assert step.sums[0].indices.tobytes() == other.sums[0].indices.tobytes()
        assert step.sums[0].values.tobytes() == other.sums[0].values.tobytes()
        assert step.recorder.bytes_sent == other.recorder.bytes_sent
        for residual, plain_residual in zip(step.residuals, other.residuals, strict=True):
            np.testing.assert_array_equal(residual, plain_residual)


@pytest.mark.parametrize("case", CASES, ids=case_id)
@pytest.mark.parametrize("dtype", DTYPES)
def test_law_1_is_exact_where_sums_are(case: Case, dtype: str) -> None:
    scenario = Scenario(size=4, num_elements=200, dtype=dtype, num_steps=8)
    gradients = random_gradients(scenario, dyadic)
    history = run(case.recipe, scenario, gradients)
    np.testing.assert_array_equal(history.gradients, gradients)  # no dtype rounds them
    laws.check_all(history, case, exactly=True)


@pytest.mark.parametrize("case", [case for case in CASES if case.loses_mass], ids=case_id)
def test_the_exception_to_law_1_is_one(case: Case) -> None:
    history = run(case.recipe, scenario := Scenario(size=2, num_elements=50), random_gradients(scenario))
    with pytest.raises(AssertionError, match="lost at element"):
        laws.nothing_is_lost(history)


_values = st.integers(-64, 64).map(lambda number: number / 64.0)


@st.composite
def small_runs(draw: st.DrawFn) -> tuple[Scenario, np.ndarray, float]:
    """Few ranks and elements, dyadic gradients with many zeros and ties, any density."""
    scenario = Scenario(
        size=draw(st.integers(1, 5)),
        num_elements=draw(st.integers(1, 40)),
        dtype=draw(st.sampled_from(DTYPES)),
        num_steps=draw(st.integers(1, 3)),
    )
    shape = (scenario.num_steps, scenario.size, scenario.num_elements)
    gradients = draw(hnp.arrays(np.float64, shape, elements=_values, fill=_values))
    return scenario, gradients, draw(st.sampled_from((0.01, 0.1, 0.5, 0.97, 1.0)))


@pytest.mark.parametrize("case", CASES, ids=case_id)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(small_run=small_runs())
def test_laws_hold_for_any_shape_and_value(case: Case, small_run: tuple[Scenario, np.ndarray, float]) -> None:
    scenario, gradients, density = small_run
    changed = Case(**{**vars(case), "recipe": case.at(density)})
    laws.check_all(run(changed.recipe, scenario, gradients), changed, exactly=True)
