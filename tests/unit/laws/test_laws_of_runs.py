"""Laws 1, 2, 4, 5 and 7 over all rows of the table, sizes and dtypes."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from horovod_sparse.feedback import recipe
from horovod_sparse.simulation import SimulatedCluster
from support import laws
from support.cases import CASES, Case, CountBand, case_id
from support.gradients import DTYPES, dyadic, gaussian, laplace, layered
from support.history import Scenario, random_gradients, run
from support.laws import rounding
from support.reference import ReferenceAccumulator
from support.sampling import rows_by

_RANKS = (1, 2, 3, 4, 8)
_SCENARIOS = (
    *(Scenario(size, num_elements) for size in _RANKS for num_elements in (1, 5, 40, 1000)),
    *(Scenario(3, 1000, dtype) for dtype in DTYPES if dtype != "float32"),
    Scenario(4, 100_000, num_steps=3),
)


@rows_by("case,scenario", CASES, _SCENARIOS, ids=case_id, each=3)
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


@rows_by("case,hosts,dtype", CASES, [0, 2], DTYPES, ids=case_id, each=2)
def test_law_1_is_exact_where_sums_are(case: Case, hosts: int, dtype: str) -> None:
    """On one level, and on two hosts of two ranks whose shards are of unequal length."""
    scenario = Scenario(size=4, num_elements=201, dtype=dtype, num_steps=8, hosts=hosts)
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
@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(small_run=small_runs())
def test_laws_hold_for_any_shape_and_value(case: Case, small_run: tuple[Scenario, np.ndarray, float]) -> None:
    scenario, gradients, density = small_run
    changed = Case(**{**vars(case), "recipe": case.at(density)})
    laws.check_all(run(changed.recipe, scenario, gradients), changed, exactly=True)


#: a quantizer's density is 1, and it is dense to its levels: tests/unit/sparsifiers/test_quantizers.py
_CASES = [case for case in CASES if not case.quantizes]


@rows_by("case,ranks,dtype", _CASES, [(1, 0), (3, 0), (8, 0), (6, 3), (8, 2)], DTYPES, ids=case_id, each=4)
def test_density_one_is_dense(case: Case, ranks: tuple[int, int], dtype: str) -> None:
    size, hosts = ranks
    scenario = Scenario(size, 301, dtype, num_steps=2, hosts=hosts)
    history = run(case.at(1.0), scenario, random_gradients(scenario, layered))
    for number, step in enumerate(history.steps):
        error = np.abs(history.dense(number) - history.gradients[number].sum(0))
        lost = case.value_rounding * np.abs(history.gradients[: number + 1]).sum((0, 1)).max()
        lost *= size if hosts else 1
        assert (error <= rounding(history, number + 1) + lost).all()
        assert np.abs(step.residuals).max() <= lost, "nothing but rounding for the wire is held back"


_NUM_ELEMENTS, _NUM_STEPS, _DROP_AT = 400_000, 24, 14
#: P, n, k
_FEW = [(8, 64, 1), (16, 64, 1), (8, 300, 2), (4, 64, 4), (8, 64, 9)]
_DENSITY, _TARGET = 0.025, 10_000  # the least that the promise is made for


def counts_of(cases: Sequence[Case], size: int, draw: Callable[..., np.ndarray]) -> np.ndarray:
    """The union count by case and step, over k; all gradients drop tenfold in the middle."""
    generator = np.random.default_rng(7)
    clusters = [SimulatedCluster(case.at(_DENSITY), _NUM_ELEMENTS, size) for case in cases]
    signal = draw(generator, (_NUM_ELEMENTS,)).astype(np.float32)
    spread = np.abs(signal) if draw is layered else np.float32(1.0)
    counts = np.zeros((len(cases), _NUM_STEPS))
    for step in range(_NUM_STEPS):
        scale = np.float32(0.1 if step >= _DROP_AT else 1.0)
        # what all ranks see alike, and as much noise of their own
        noise = generator.standard_normal((size, _NUM_ELEMENTS), np.float32)
        noise *= scale * spread
        noise += scale * signal
        for row, cluster in zip(counts, clusters, strict=True):
            row[step] = cluster.synchronize([*noise.copy()])[0].indices.size
    assert all(cluster.buckets[0].last.num_target == _TARGET for cluster in clusters)
    return counts / _TARGET


@rows_by("draw,size", [gaussian, laplace, layered], [2, 8], ids=lambda draw: draw.__name__)
def test_union_count_stays_near_target(draw: Any, size: int) -> None:
    """Of every rule that promises it: drawing the numbers takes longer than selecting them."""
    cases = [case for case in CASES if case.count_band and case.recipe.sparsifier.quantum == 1]
    for case, counts in zip(cases, counts_of(cases, size, draw), strict=True):
        band = case.count_band
        assert isinstance(band, CountBand)
        assert band.from_target <= _TARGET
        assert 1.0 / band.first <= counts[0] <= band.first, case_id(case)
        assert np.abs(counts[4:] - 1.0).mean() <= band.settled, case_id(case)


@rows_by("shape,name,changing", _FEW, ["micro", "exdyna"], [True, False])
def test_few_elements_are_as_many_as_promised_on_average(
    shape: tuple[int, int, int], name: str, changing: bool
) -> None:
    """Where every rank's own part of k would be less than one element, or a few."""
    size, num_elements, k = shape
    generator, num_steps = np.random.default_rng(k), 240
    cluster = SimulatedCluster(recipe(name, density=k / num_elements), num_elements, size)
    gradients, union = generator.standard_normal((size, num_elements), np.float32), 0
    for _ in range(num_steps):
        if changing:
            gradients = generator.standard_normal((size, num_elements), np.float32)
        union += cluster.synchronize([*gradients.copy()])[0].indices.size
    assert abs(union / (k * num_steps) - 1) < 0.06
