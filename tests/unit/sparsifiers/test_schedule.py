"""Densities over the steps, and that counts follow them with every sparsifier."""

from typing import Any

import numpy as np
import pytest

from horovod_sparse.feedback import Recipe
from horovod_sparse.sparsifiers.schedule import Exponential, Linear, Stairs
from support import laws
from support.cases import CASES, Case, case_id
from support.gradients import layered
from support.history import Scenario, random_gradients, run


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
