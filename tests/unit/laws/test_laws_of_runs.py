"""Laws 1, 2, 4, 5 and 7 over all rows of the table, sizes and dtypes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from support import laws
from support.cases import CASES, Case, case_id
from support.gradients import DTYPES, dyadic, gaussian, layered
from support.history import Scenario, random_gradients, run
from support.reference import ReferenceAccumulator

_RANKS = (1, 2, 3, 4, 8)
_SCENARIOS = (
    *(Scenario(size, num_elements) for size in _RANKS for num_elements in (1, 5, 40, 1000)),
    *(Scenario(3, 1000, dtype) for dtype in DTYPES if dtype != "float32"),
    Scenario(4, 100_000, num_steps=3),
)


@pytest.mark.parametrize("scenario", _SCENARIOS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_all_laws_hold_in_either_memory(case: Case, scenario: Scenario) -> None:
    draw = layered if scenario.num_elements >= 1000 else gaussian
    fast = run(case.recipe, scenario, random_gradients(scenario, draw))
    laws.check_all(fast, case)
    plain = run(case.recipe, scenario, fast.gradients, ReferenceAccumulator)
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
