"""Law 3: with everything selected the result is that of a plain allreduce."""

from __future__ import annotations

import numpy as np
import pytest

from support.cases import CASES, Case, case_id
from support.gradients import DTYPES, dyadic, layered
from support.history import Scenario, random_gradients, run
from support.laws import rounding

#: a quantizer's density is 1, and it is dense to its levels: tests/unit/sparsifiers/test_quantizers.py
_CASES = [case for case in CASES if not case.quantizes]


@pytest.mark.parametrize("case", _CASES, ids=case_id)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_density_one_is_dense(case: Case, dtype: str, size: int) -> None:
    scenario = Scenario(size, 300, dtype, num_steps=2)
    history = run(case.at(1.0), scenario, random_gradients(scenario, layered))
    for number, step in enumerate(history.steps):
        error = np.abs(history.dense(number) - history.gradients[number].sum(0))
        lost = case.value_rounding * np.abs(history.gradients[: number + 1]).sum((0, 1)).max()
        assert (error <= rounding(history, number + 1) + lost).all()
        assert np.abs(step.residuals).max() <= lost, "nothing but rounding for the wire is held back"


@pytest.mark.parametrize("case", [case for case in _CASES if not case.value_rounding], ids=case_id)
def test_density_one_is_dense_exactly_where_sums_are_exact(case: Case) -> None:
    scenario = Scenario(5, 77, num_steps=3)
    history = run(case.at(1.0), scenario, random_gradients(scenario, dyadic))
    for number in range(scenario.num_steps):
        np.testing.assert_array_equal(history.dense(number), history.gradients[number].sum(0))
