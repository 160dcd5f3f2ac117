"""Densities over the steps, positions drawn at random, and the two threshold rules, number by number."""

import pickle
from collections import Counter
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from horovod_sparse.arrays import HostAccumulator
from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import Recipe, recipe
from horovod_sparse.sparsifiers import ALGORITHMS, BucketInfo
from horovod_sparse.sparsifiers.randomk import RandomK, draw_positions
from horovod_sparse.sparsifiers.schedule import Exponential, Linear, Stairs
from horovod_sparse.thresholds import Sketch, ThresholdScaling, ThresholdState
from support import laws
from support.cases import CASES, Case, case_id
from support.gradients import layered
from support.laws import Scenario, random_gradients, run


@pytest.mark.parametrize(
    ("schedule", "final", "wanted"),
    [
        # 0.16 -> 0.01 in 4 steps: a factor of (1 / 16) ** (1 / 4) = 1 / 2 each
        (Exponential(steps=4, start=0.16), 0.01, [0.16, 0.08, 0.04, 0.02, 0.01, 0.01]),
        (Exponential(epochs=2, steps_per_epoch=2, start=0.16), 0.01, [0.16, 0.08, 0.04, 0.02, 0.01, 0.01]),
        (Linear(steps=5, start=0.6), 0.1, [0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1]),
        (Linear(epochs=2.5, steps_per_epoch=2, start=0.6), 0.1, [0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1]),
        # Section 3.3: 75 %, 93.75 %, 98.4375 %, 99.6 %, 99.9 % are left out, epoch by epoch
        (Stairs(steps_per_epoch=1), 0.001, [0.25, 0.0625, 0.015625, 0.004, 0.001, 0.001]),
        (Stairs(steps=2, densities=[0.5]), 0.1, [0.5, 0.5, 0.1]),  # type: ignore[arg-type]
    ],
)
def test_schedules_by_hand(schedule: Any, final: float, wanted: list[float]) -> None:
    assert [schedule.density_at(step, final) for step in range(len(wanted))] == pytest.approx(wanted)


@pytest.mark.parametrize("case", [case for case in CASES if not case.quantizes], ids=case_id)
def test_the_laws_hold_through_a_warm_up(case: Case) -> None:
    sparsifier = type(case.recipe.sparsifier)(
        **{**vars(case.recipe.sparsifier), "schedule": Stairs(steps=2, densities=(1.0, 0.3))}
    )
    made = Recipe(sparsifier, case.recipe.feedback)
    scenario = Scenario(3, 400, num_steps=6)
    history = run(made, scenario, random_gradients(scenario, layered))
    laws.sums_are_right(history)
    laws.replicas_agree(history)
    laws.traffic_as_declared(history)
    if not case.loses_mass:
        laws.nothing_is_lost(history)
    targets = [history.cluster.buckets[0].recipe.sparsifier.density_at(step) for step in range(6)]
    assert targets == [1.0, 1.0, 0.3, 0.3, 0.07, 0.07]
    if not case.value_rounding:
        for number in range(2):  # density 1 is dense, in a warm-up too
            expected = history.gradients[number].sum(0)
            np.testing.assert_allclose(history.dense(number), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_density_is_a_fraction(name: str) -> None:
    wrong: list[Any] = [0, -0.1, 1.0001, 5, float("nan"), float("inf"), "0.1", None, True]
    for density in wrong:
        with pytest.raises(ArgumentError, match=r"density=.*\(0, 1\]"):
            recipe(name, density=density)


def test_random_positions_depend_on_seed_bucket_and_step_alone() -> None:
    info = BucketInfo("w", 1000, rank=0, size=4)
    other_rank = BucketInfo("w", 1000, rank=3, size=4)
    shared, own = RandomK(density=0.05), RandomK(density=0.05, shared=False)
    before = pickle.dumps(np.random.get_state())  # noqa: NPY002 -- the global generator is not touched
    drawn = shared.positions(info, 7)
    assert pickle.dumps(np.random.get_state()) == before  # noqa: NPY002
    assert drawn.tolist() == shared.positions(other_rank, 7).tolist()
    assert drawn.tolist() != shared.positions(info, 8).tolist()
    assert drawn.tolist() != shared.positions(BucketInfo("v", 1000, size=4), 7).tolist()
    first, again, other = (
        BucketInfo(name, 1000, number=number) for name, number in (("w_1", 3), ("w_9", 3), ("w_1", 4))
    )
    assert shared.positions(first, 7).tolist() == shared.positions(again, 7).tolist()
    assert shared.positions(first, 7).tolist() != shared.positions(other, 7).tolist()
    assert drawn.tolist() != RandomK(density=0.05, seed=1).positions(info, 7).tolist()
    assert own.positions(info, 7).tolist() != own.positions(other_rank, 7).tolist()
    assert np.unique(drawn).size == 50


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_every_set_is_as_likely(k: int) -> None:
    generator, trials = np.random.default_rng(k), 6000
    drawn = Counter(tuple(draw_positions(generator, 5, k).tolist()) for _ in range(trials))
    sets = list(combinations(range(5), k))
    assert sorted(drawn) == sets
    expected = trials / len(sets)
    # chi-squared with len(sets) - 1 <= 9 degrees of freedom: above 27.9 once in a thousand
    assert sum((drawn[one] - expected) ** 2 / expected for one in sets) < 27.9


def holding(values: list[float]) -> HostAccumulator:
    accumulator = HostAccumulator(len(values), "float64")
    accumulator.assign(np.array(values))
    return accumulator


@pytest.mark.parametrize(
    ("count", "factor"),
    [
        # Algorithm 5, beta = 1.1, gamma = 0.005, k = 1000: exam = k' / k
        (5000, 1.005),  # exam > 1.1
        (1101, 1.005),
        (1100, 1.00125),  # 1.1 is not > 1.1, but > 1 / 1.1 = 0.90909...
        (1000, 1.00125),  # inside the band the threshold only ever grows
        (910, 1.00125),
        (909, 0.995),  # 0.909 is not > 0.90909...
        (0, 0.995),
    ],
)
def test_algorithm_5(count: int, factor: float) -> None:
    state = ThresholdScaling().steer(count, 1000, ThresholdState(threshold=2.0))
    assert state.threshold == pytest.approx(2.0 * factor, rel=1e-12)
    assert 1 < ThresholdScaling(beta=6).steer(count or 200, 1000, state).threshold / state.threshold < 1.002


def test_the_sketch_by_hand() -> None:
    accumulator = holding([0.5, -4.0, 3.0, -1.0, 2.0, 0.0])
    assert Sketch().find(accumulator, 2, ThresholdState()).threshold == 3.0
    # c = 1.5: order round(2 * 1.5) = 3
    assert Sketch().find(accumulator, 2, ThresholdState(correction=1.5)).threshold == 2.0
    # never below order 1 or above n
    assert Sketch().find(accumulator, 2, ThresholdState(correction=1 / 16)).threshold == 4.0
    assert Sketch().find(accumulator, 5, ThresholdState(correction=16.0)).threshold == 0.0
    # twice k: c = 0.5 ** 0.5 = 0.70711; then half of k: c = 0.70711 * 2 ** 0.5 = 1
    state = Sketch().steer(200, 100, ThresholdState())
    assert state.correction == pytest.approx(0.5**0.5)
    state = Sketch().steer(50, 100, state)
    assert state.correction == pytest.approx(1.0)
    # nothing selected says nothing
    state = Sketch().steer(0, 100, state)
    assert state.correction == pytest.approx(1.0)
    # weight of the share: 0.5 * 30 / (30 + 10) = 0.375; 31 ** 0.375 * 101 ** 0.625 - 1 = 63.9
    # (of the 120 hits 100 count, the order asked for)
    half = Sketch(memory=0.5)
    assert half.num_to_send(120, 100, ThresholdState(threshold=1.0, share=0.3, correction=1.0)) == 64
    # no more hits count than the order asked for: 100 (many magnitudes are equal)
    assert half.num_to_send(10**6, 100, ThresholdState(threshold=1.0, share=0.3)) == 64
    # a window that gave nothing has only its hits to go by
    assert half.num_to_send(7, 100, ThresholdState(threshold=1.0, share=0.0)) == 7
