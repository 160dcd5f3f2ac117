"""Densities over the steps, positions drawn at random, thresholds and partitions, number by number."""

import logging
import pickle
from collections import Counter
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from horovod_sparse.arrays import HostAccumulator
from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import Recipe, recipe
from horovod_sparse.sparsifiers import ALGORITHMS, BucketInfo, SparsifierState
from horovod_sparse.sparsifiers.dgc import DGC
from horovod_sparse.sparsifiers.hard_threshold import HardThreshold
from horovod_sparse.sparsifiers.randomk import RandomK, draw_positions
from horovod_sparse.sparsifiers.schedule import Exponential, Stairs
from horovod_sparse.thresholds import RULES, ThresholdState
from support import laws
from support.cases import CASES, Case, case_id
from support.gradients import layered
from support.laws import Scenario, random_gradients, run


@pytest.mark.parametrize(
    ("schedule", "final", "wanted"),
    [
        # 0.16 -> 0.01 in 4 steps: a factor of (1 / 16) ** (1 / 4) = 1 / 2 each
        (Exponential(steps=4, start=0.16), 0.01, [0.16, 0.08, 0.04, 0.02, 0.01, 0.01]),
        # Section 3.3: 75 %, 93.75 %, 98.4375 %, 99.6 %, 99.9 % are left out, epoch by epoch
        (Stairs(steps=1), 0.001, [0.25, 0.0625, 0.015625, 0.004, 0.001, 0.001]),
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
    shared = RandomK(density=0.05)
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


@pytest.mark.parametrize(
    ("rule", "count", "factor"),
    [
        # Algorithm 5, beta = 1.1, gamma = 0.005, k = 1000: exam = k' / k
        ("paper", 5000, 1.005),  # exam > 1.1
        ("paper", 1101, 1.005),
        ("paper", 1100, 1.00125),  # 1.1 is not > 1.1, but > 1 / 1.1 = 0.90909...
        ("paper", 1000, 1.00125),  # inside the band the threshold only ever grows
        ("paper", 910, 1.00125),
        ("paper", 909, 0.995),  # 0.909 is not > 0.90909...
        ("paper", 0, 0.995),
        ("sketch", 250, 2.0),  # c: the root of k / count, from 1 / 16 to 16
        ("sketch", 1, 16.0),
        ("sketch", 1_000_000, 1 / 16),
    ],
)
def test_rules_of_thresholds_by_hand(rule: str, count: int, factor: float) -> None:
    state = RULES[rule].steer(count, 1000, ThresholdState(threshold=2.0))
    assert state.threshold * state.correction == pytest.approx(2.0 * factor, rel=1e-12)


class Sampled(HostAccumulator):
    """An accumulator whose sample says what a test wants, and that notes the thresholds it is asked for."""

    def __init__(self, values: Any, sample: list[float]) -> None:
        super().__init__(len(values), density=0.1)
        self.fold(np.array(values, np.float32))
        self.sample, self.asked = np.array(sample, np.float32), []

    def sample_magnitudes(self, stride: int, offset: int = 0) -> Any:
        return self.sample

    def at_least(self, threshold: float, start: int = 0, stop: int | None = None) -> Any:
        self.asked.append(threshold)
        return super().at_least(threshold, start, stop)


_RAMP = np.arange(1, 101)  # magnitudes 1 to 100, k = 10: the tenth largest is 91


@pytest.mark.parametrize(
    ("guess", "asked", "sent"),
    [
        (91.0, [91.0], range(90, 100)),  # 91 and more: exactly 10
        (88.0, [88.0], range(87, 100)),  # 88 and more: 13 = 1.3 k, which is not above 1.3 k
        (87.0, [87.0], range(90, 100)),  # 87 and more: 14 is above 1.3 k, so the 10 largest of them
        (93.0, [93.0], range(92, 100)),  # 93 and more: 8 = 0.8 k, which is not below 0.8 k
        # 94 and more: 7 is below; 0.8 * 94 = 75.2 lets 25 through: above 1.3 k, so the 10 largest.
        (94.0, [94.0, 0.8 * 94.0], range(90, 100)),
        (110.0, [110.0, 88.0], range(87, 100)),  # 110: nothing; 88: 13, as above
        # 2000: 1600, 1280, 1024, ... ten times at most: 2000 * 0.8^10 = 214.7, nothing passes.
        (2000.0, [2000.0 * 0.8**i for i in range(11)], []),
    ],
)
def test_dgc_lowers_or_cuts_by_the_number_that_pass(guess: float, asked: list[float], sent: Any) -> None:
    accumulator = Sampled(_RAMP, [guess] * 10)
    found = DGC(density=0.1).select(accumulator, 10, SparsifierState(), BucketInfo("b", 100))
    assert found.indices.tolist() == list(sent)
    assert accumulator.asked == pytest.approx(asked)


def test_a_threshold_that_is_left_out_is_told_once(caplog: Any) -> None:
    info = BucketInfo("guessed once", 16)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # 1 / (2 sqrt(k)), k = 4 of 16
            assert HardThreshold(density=0.25).threshold_for(info, 0) == 0.25
    assert caplog.text.count("guessed once") == 1 and "threshold=" in caplog.text
