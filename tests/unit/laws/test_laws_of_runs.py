"""Laws 1, 2, 4, 5, 7, 8 and 9 over all rows of the table, sizes, and dtypes."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from horovod_sparse.feedback import parse_recipe, recipe
from horovod_sparse.simulation import SimulatedCluster
from support import laws
from support.cases import CASES, Case, CountBand, case_id
from support.gradients import DTYPES, gaussian, laplace, layered
from support.laws import Scenario, random_gradients, rounding, run
from support.sampling import rows_by


@pytest.mark.parametrize("case", [case for case in CASES if case.loses_mass], ids=case_id)
def test_without_feedback_law_1_does_not_hold(case: Case) -> None:
    history = run(case.recipe, scenario := Scenario(size=2, num_elements=50), random_gradients(scenario))
    with pytest.raises(AssertionError, match="lost at element"):
        laws.nothing_is_lost(history)


_values = st.integers(-64, 64).map(lambda number: number / 64.0)


@st.composite
def small_runs(draw: st.DrawFn) -> tuple[Scenario, np.ndarray, float]:
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


@rows_by(
    "ranks,wire",
    [(2, 2), (4, 2), (6, 2), (6, 3), (8, 8)],
    ["", ",values=float16", ",values=2bit,indices=gaps"],
    each=2,
)
def test_laws_hold_with_every_number_of_teams(ranks: tuple[int, int], wire: str) -> None:
    size, teams = ranks
    case = Case(parse_recipe(f"spardl:density=0.07,teams={teams}{wire}"))
    scenario = Scenario(size, 200, num_steps=4)
    laws.check_all(run(case.recipe, scenario, random_gradients(scenario)), case)


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
    cases = [case for case in CASES if case.count_band]
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
    size, num_elements, k = shape
    generator, num_steps = np.random.default_rng(k), 240
    cluster = SimulatedCluster(recipe(name, density=k / num_elements), num_elements, size)
    gradients, union = generator.standard_normal((size, num_elements), np.float32), 0
    for _ in range(num_steps):
        if changing:
            gradients = generator.standard_normal((size, num_elements), np.float32)
        union += cluster.synchronize([*gradients.copy()])[0].indices.size
    assert abs(union / (k * num_steps) - 1) < 0.06


_KEEPING = [case for case in CASES if not case.loses_mass]


@pytest.mark.parametrize("case", _KEEPING, ids=case_id)
def test_nothing_larger_than_all_gradients_is_held_or_sent(case: Case) -> None:
    scenario = Scenario(3, 40, num_steps=7)
    laws.dense_bounds(run(case.recipe, scenario, random_gradients(scenario)))


def zeros(generator: np.random.Generator, shape: Any) -> np.ndarray:
    return np.zeros(shape)


def equal(generator: np.random.Generator, shape: Any) -> np.ndarray:
    """No threshold separates them: a rule that means k may get 0 or n, but nothing may be lost."""
    return generator.choice([-0.25, 0.25], shape)


def denormal(generator: np.random.Generator, shape: Any, kind: type = np.float32) -> np.ndarray:
    return generator.integers(-4, 5, shape) / 8.0 * float(np.finfo(kind).tiny)


def denormal_64(generator: np.random.Generator, shape: Any) -> np.ndarray:
    return denormal(generator, shape, np.float64)


def idle(generator: np.random.Generator, shape: Any) -> np.ndarray:
    return gaussian(generator, shape) * (np.arange(shape[1]) < shape[1] - 1)[:, None]


def of_all_sizes(generator: np.random.Generator, shape: Any) -> np.ndarray:
    return np.ldexp(gaussian(generator, shape), generator.integers(-120, 120, shape))


_RUNS: dict[str, tuple[Any, Scenario]] = {
    f"{draw.__name__}-{scenario}": (draw, scenario)
    for draw, scenario in (
        *((gaussian, Scenario(size, n)) for size in (1, 2, 3, 4, 8) for n in (1, 5, 40)),
        *((layered, Scenario(size, 1000)) for size in (1, 2, 3, 4, 8)),
        *((layered, Scenario(3, 1000, dtype)) for dtype in DTYPES if dtype != "float32"),
        (layered, Scenario(4, 100_000, num_steps=3)),
        *((zeros, Scenario(4, 64, dtype)) for dtype in DTYPES),
        *((idle, Scenario(size, 200, num_steps=2 * size)) for size in (1, 2, 4)),
        *((equal, Scenario(3, 96, dtype, num_steps=5)) for dtype in DTYPES),
        *((denormal, Scenario(2, 120, dtype, num_steps=5)) for dtype in ("float32", "bfloat16")),
        (denormal_64, Scenario(2, 120, "float64", num_steps=5)),
        *((of_all_sizes, Scenario(2, 300, dtype)) for dtype in ("float32", "float64")),
        *(
            (gaussian, Scenario(size, n, num_steps=2 * size))
            for size, n in ((8, 3), (5, 4), (4, 31), (8, 65))
        ),
    )
}


@rows_by("case,named", CASES, _RUNS, ids=case_id, each=9)
def test_all_laws_hold_for_every_size_type_and_kind_of_gradients(case: Case, named: str) -> None:
    draw, scenario = _RUNS[named]
    gradients = random_gradients(scenario, draw)
    history = run(case.recipe, scenario, gradients)
    laws.check_all(history, case, exactly=draw in (zeros, equal, denormal, denormal_64))
    if draw in (zeros, idle) or scenario.num_elements == 1:
        applied = any(history.dense(number).any() for number in range(scenario.num_steps))
        assert applied == gradients.any()


_PATTERNS = ("equal", "all", "some", "one", "one among others")


def starve(case: Case, size: int, num_elements: int, k: int, pattern: str, seed: int = 0) -> int:
    random, shape = np.random.default_rng(seed), (size, num_elements)
    growth, swing = random.integers(1, 5, shape), np.zeros(shape)
    if pattern == "equal":
        growth[:] = 1
    elif pattern == "some":  # a fifth
        growth[random.random(shape) > 0.2] = 0
    elif pattern == "cancelling":  # a third grows fast on all ranks and adds up to 0
        fast = random.random(num_elements) < 1 / 3
        growth[:, fast] *= 8
        growth[-1, fast] = -growth[:-1, fast].sum(0)
    elif pattern != "all":  # one element, or a tenth slowly while all else swings widely
        some = random.random(shape) < (0.1 if pattern == "one among others" else 0.0)
        some[random.integers(size), random.integers(num_elements)] = True
        growth = some.astype(int)
        if pattern == "one among others":
            swing = np.where(some, 0.0, random.integers(0, 9, shape))
    growth = (growth * random.choice([-1, 1], num_elements)).astype(np.float32)
    cluster = SimulatedCluster(case.at(k / num_elements), num_elements, size)
    # P: what only one rank holds may have to wait for its turn
    most_steps = 200 + 60 * size * num_elements // k
    return laws.nobody_starves(cluster, growth, swing.astype(np.float32), most_steps)


#: P, n, k and pattern at which some did
_FOUND = [
    *((8, 10, 1, "all"), (1, 47, 1, "equal"), (3, 24, 2, "one among others")),
    *((16, 12, 5, "some"), (3, 12, 2, "cancelling")),
]


@rows_by("case,shape", _KEEPING, _FOUND, ids=case_id)
def test_nobody_starves_at_shapes_at_which_some_did(case: Case, shape: tuple[int, int, int, str]) -> None:
    starve(case, *shape)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int]:
    size, num_elements = draw(st.integers(1, 16)), draw(st.integers(1, 64))
    k = draw(st.sampled_from((1, 2, 3, size // 2, size - 1, size, size + 1)))
    return size, num_elements, min(max(k, 1), num_elements)


@pytest.mark.nightly
@pytest.mark.parametrize("case", _KEEPING, ids=case_id)
@settings(max_examples=5, deadline=None, derandomize=True, database=None)
@given(shape=shapes(), pattern=st.sampled_from(_PATTERNS), seed=st.integers(0, 99))
def test_nobody_starves_at_any_shape(
    case: Case, shape: tuple[int, int, int], pattern: str, seed: int
) -> None:
    starve(case, *shape, pattern, seed)


@pytest.mark.parametrize(
    ("text", "growth", "most_steps"),
    [
        # bounds that moved in step with the turns kept element 1 out of rank 0's part
        ("exdyna:density=0.3,rebalance=paper", [[0, 4, 0], [0, 0, 4], [4, 0, 0], [1, 0, 0]], 400),
        # one slot for two hits: the higher index won every time
        ("dragonn:density=0.25,slots_per_selected=0.5", [[4, 1, 1, 1, 1, 1, 1, 4]], 400),
    ],
)
def test_every_element_gets_its_turn(text: str, growth: list[list[int]], most_steps: int) -> None:
    grows = np.array(growth, np.float32)
    cluster = SimulatedCluster(parse_recipe(text), grows.shape[1], grows.shape[0])
    laws.nobody_starves(cluster, grows, np.zeros_like(grows), most_steps)
