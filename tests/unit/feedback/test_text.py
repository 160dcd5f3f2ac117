"""Recipes as text: every row, nested values, and what is no recipe."""

from typing import Any

import pytest

from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import (
    AdamFeedback,
    ErrorFeedback,
    MomentumCorrection,
    NoFeedback,
    ParameterRules,
    Recipe,
    RMSpropFeedback,
    parse_recipe,
    recipe,
)
from horovod_sparse.sparsifiers import DGC, TopK
from horovod_sparse.sparsifiers.schedule import Exponential, Linear, Stairs
from support.cases import CASES, Case, case_id
from support.sampling import rows_by


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_every_row(case: Case) -> None:
    assert parse_recipe(case.recipe.describe()) == case.recipe


_FEEDBACKS = [
    ErrorFeedback(),
    ErrorFeedback(scale_residual=True),
    ErrorFeedback(clip_norm=0.5),
    NoFeedback(),
    AdamFeedback(beta2=0.99, clip_norm=1.0),
    RMSpropFeedback(eps=1e-4),
    MomentumCorrection(),
    MomentumCorrection(momentum=0.5, nesterov=True, masking=False, clip_norm=1.5, scale_residual=True),
]
_SCHEDULES = [
    None,
    Exponential(steps=400),
    Exponential(epochs=4, steps_per_epoch=100, start=0.5),
    Linear(steps=7, start=1.0),
    Stairs(steps_per_epoch=50),
    Stairs(steps=3, densities=(0.5, 0.1)),
]
_RULES = [
    ParameterRules(),
    ParameterRules(dense_below=1024),
    ParameterRules(dense=("*.bias", "norm[12].*")),
    ParameterRules(densities={"embedding.*": 0.01, "a,b": 1.0}, dense_below=3),  # type: ignore[arg-type]
]


@rows_by("feedback,schedule,rules", _FEEDBACKS, _SCHEDULES, _RULES, each=6)
def test_there_and_back(feedback: Any, schedule: Any, rules: ParameterRules) -> None:
    made = Recipe(DGC(density=0.02, schedule=schedule, threshold="exact"), feedback, rules)
    assert parse_recipe(made.describe()) == made
    assert hash(parse_recipe(made.describe())) == hash(made)


def test_by_hand() -> None:
    text = (
        "topk: density = 0.01, schedule=exponential(steps=400,start=0.25), "
        "feedback=momentum(momentum=0.9, clip_norm=1.0), dense=('*.bias', '*.norm'), dense_below=64"
    )
    assert parse_recipe(text) == Recipe(
        TopK(density=0.01, schedule=Exponential(steps=400, start=0.25)),
        MomentumCorrection(momentum=0.9, clip_norm=1.0),
        ParameterRules(64, ("*.bias", "*.norm")),
    )
    assert parse_recipe("hard_threshold:threshold=0.01") == recipe("hard_threshold", threshold=0.01)
    assert parse_recipe("topk:feedback=momentum").feedback == MomentumCorrection()
    assert recipe("topk", schedule="linear(steps=3)").sparsifier.schedule == Linear(steps=3)
    assert recipe("topk", feedback="momentum(nesterov=true)").feedback == MomentumCorrection(nesterov=True)
    assert parse_recipe("topk:dense=*.bias").rules.dense == ("*.bias",)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("topk:schedule=exponential(steps=400", "closed"),
        ("topk:dense=('*.bias)", "closed"),
        ("topk:density=0.1,density=0.2", "density once"),
        ("topk:schedule=expontial(steps=4)", "unknown schedule 'expontial'.*exponential, linear, stairs"),
        ("topk:schedule=linear(stps=4)", "argument of linear 'stps'.*steps"),
        ("topk:feedback=momentun(momentum=0.5)", "unknown feedback 'momentun'.*error, momentum, none"),
        ("exdyna:capacity=exact", "capacity='exact' is not allowed: give no such argument: messages are as"),
        ("spardl:trial_steps=2", "trial_steps=2 is not allowed: give no such argument: teams='auto' are"),
        ("cltk:feedback=lowpass", "feedback='lowpass' is not allowed: give 'error' with a smaller"),
        ("cltk:feedback=lowpass(beta=0.1)", "feedback='lowpass' is not allowed: give 'error' with a smaller"),
        ("topk:feedback=momentum(momentum=2)", "momentum=2"),
        ("topk:density=linear(steps=4)", "unknown density 'linear'"),
        ("topk:schedule=linear()", "steps=None"),
        ("topk:densities={'a':2}", "densities.'a'.=2"),
    ],
)
def test_text_that_is_no_recipe(text: str, complaint: str) -> None:
    with pytest.raises(ArgumentError, match=complaint):
        parse_recipe(text)
