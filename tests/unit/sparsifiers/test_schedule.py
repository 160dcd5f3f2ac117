"""Densities over the steps, and that counts follow them with every sparsifier."""

from typing import Any

import numpy as np
import pytest

from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import Recipe, recipe
from horovod_sparse.sparsifiers.schedule import Exponential, Linear, Stairs
from support import laws
from support.cases import CASES, Case, case_id
from support.gradients import layered
from support.history import Scenario, random_gradients, run


def test_exponential_by_hand() -> None:
    # 0.16 -> 0.01 in 4 steps: a factor of (1 / 16) ** (1 / 4) = 1 / 2 each
    found = [Exponential(steps=4, start=0.16).density_at(step, 0.01) for step in range(6)]
    assert found == pytest.approx([0.16, 0.08, 0.04, 0.02, 0.01, 0.01])


def test_linear_by_hand() -> None:
    found = [Linear(steps=5, start=0.6).density_at(step, 0.1) for step in range(7)]
    assert found == pytest.approx([0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1])


def test_stairs_are_dgcs() -> None:
    # Section 3.3: 75 %, 93.75 %, 98.4375 %, 99.6 %, 99.9 % are left out, epoch by epoch
    found = [Stairs(steps_per_epoch=10).density_at(10 * epoch, 0.001) for epoch in range(6)]
    assert [1 - density for density in found] == pytest.approx([0.75, 0.9375, 0.984375, 0.996, 0.999, 0.999])
    assert Stairs(steps=2, densities=[0.5]).density_at(1, 0.1) == 0.5  # type: ignore[arg-type]
    assert Stairs(steps=2, densities=[0.5]).density_at(2, 0.1) == 0.1  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", [Exponential, Linear])
def test_epochs_are_steps(schedule: Any) -> None:
    by_step, by_epoch = schedule(steps=30), schedule(epochs=2.5, steps_per_epoch=12)
    assert [by_step.density_at(t, 0.01) for t in range(40)] == [
        by_epoch.density_at(t, 0.01) for t in range(40)
    ]


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Exponential(), "steps=None"),
        (lambda: Linear(steps=3, start=0.0), "start=0.0"),
        (lambda: Linear(steps=3, epochs=2, steps_per_epoch=5), "either steps"),
        (lambda: Stairs(steps=1, densities=()), "densities"),
        (lambda: Stairs(steps=1, densities=0.1), "densities=0.1"),  # type: ignore[arg-type]
        (lambda: recipe("topk", schedule=0.1), "schedule=0.1"),
    ],
)
def test_wrong_arguments_are_named(make: Any, complaint: str) -> None:
    with pytest.raises(ArgumentError, match=complaint):
        make()


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


_N, _START, _FINAL, _LENGTH = 400_000, 0.25, 0.025, 12
