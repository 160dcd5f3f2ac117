"""Law 8: edges of shape and value."""

import numpy as np

from support import laws
from support.cases import CASES, Case, case_id
from support.gradients import DTYPES, gaussian
from support.history import Scenario, random_gradients, run
from support.sampling import rows_by


@rows_by("case,dtype", CASES, DTYPES, ids=case_id)
def test_all_zeros(case: Case, dtype: str) -> None:
    scenario = Scenario(4, 64, dtype)
    history = run(case.recipe, scenario, np.zeros((4, 4, 64)))
    laws.check_all(history, case, exactly=True)
    for number in range(scenario.num_steps):
        assert not history.dense(number).any()


@rows_by("case,size", CASES, [1, 2, 4], ids=case_id)
def test_an_idle_rank_holds_nobody_up(case: Case, size: int) -> None:
    """The last rank has zeros only, so it selects nothing, or zeros."""
    scenario = Scenario(size, 200, num_steps=2 * size)
    gradients = random_gradients(scenario)
    gradients[:, -1] = 0.0
    history = run(case.recipe, scenario, gradients)
    laws.check_all(history, case)
    if size > 1:
        assert any(history.dense(number).any() for number in range(scenario.num_steps))


@rows_by("case,dtype", CASES, DTYPES, ids=case_id)
def test_all_magnitudes_equal(case: Case, dtype: str) -> None:
    """No threshold separates them: a rule that means k may get 0 or n, but nothing may be lost."""
    scenario = Scenario(3, 96, dtype, num_steps=5)
    signs = np.random.default_rng(3).choice([-0.25, 0.25], (5, 3, 96))
    laws.check_all(run(case.recipe, scenario, signs), case, exactly=True)


@rows_by("case,dtype", CASES, ["float32", "bfloat16", "float64"], ids=case_id)
def test_denormals(case: Case, dtype: str) -> None:
    """Numbers below the smallest normal one are numbers: neither lost nor taken for 0."""
    scenario = Scenario(2, 120, dtype, num_steps=5)
    tiny = np.finfo(np.float64 if dtype == "float64" else np.float32).tiny
    gradients = random_gradients(scenario, lambda generator, shape: generator.integers(-4, 5, shape) / 8.0)
    history = run(case.recipe, scenario, gradients * float(tiny))
    assert history.gradients.any()
    laws.check_all(history, case, exactly=True)


@rows_by("case,dtype", CASES, ["float32", "float64"], ids=case_id)
def test_magnitudes_of_all_sizes(case: Case, dtype: str) -> None:
    """From near the smallest to near the largest number in one bucket; their squares overflow."""
    scenario = Scenario(2, 300, dtype)
    exponents = np.random.default_rng(11).integers(-120, 120, (4, 2, 300))
    history = run(case.recipe, scenario, np.ldexp(random_gradients(scenario, gaussian), exponents))
    laws.check_all(history, case)


@rows_by("case,shape", CASES, [(8, 1), (8, 3), (5, 4), (1, 1), (4, 31), (8, 65)], ids=case_id)
def test_fewer_elements_than_ranks_or_blocks(case: Case, shape: tuple[int, int]) -> None:
    size, num_elements = shape
    scenario = Scenario(size, num_elements, num_steps=2 * size)
    history = run(case.recipe, scenario, random_gradients(scenario))
    laws.check_all(history, case)
    applied = sum(np.abs(history.dense(number)) for number in range(scenario.num_steps))
    if num_elements == 1:
        assert applied.any(), "the only element is sent at some time"
