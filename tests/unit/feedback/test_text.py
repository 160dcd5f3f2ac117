"""Recipes as text: every row, nested values, and what is no recipe."""

import pickle
import re
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
def test_every_row_as_text_and_pickled(case: Case) -> None:
    for again in (parse_recipe(case.recipe.describe()), pickle.loads(pickle.dumps(case.recipe))):
        assert again == case.recipe and hash(again) == hash(case.recipe)


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
    made = [
        parse_recipe(f"randomk:shared={truth}").sparsifier for truth in ("false", "False", "true", "True")
    ]
    assert [one.shared for one in made] == [False, False, True, True]  # type: ignore[attr-defined]
    assert parse_recipe("qsgd:norm=l2,levels=127") == recipe("qsgd", norm="l2", levels=127)


#: what is wrong is repeated as it stands: the last argument
_REPEATED = """
    topk:quantum=0 exdyna:alpha=0.9 exdyna:blocks_per_move=1.0 micro:threshold=0.5 randomk:seed=-1
    hard_threshold:threshold=0.0 dgc:sample_fraction=1.5 dragonn:slots_per_selected=0 mstopk:num_passes=0
    sidco:first_density=1.0 sidco:adapt_every=0 qsgd:levels=128 signsgd:group=33 topk:schedule=0.1
    topk:density=auto(least=5e-324) topk:density=auto(tolerance=-1.0) topk:density=auto(least=0.01,most=0.001)
    topk:schedule=linear(steps=3,start=0.0) topk:schedule=stairs(steps=1,densities=0.1)
    topk:feedback=momentum(momentum=2) topk:feedback=momentum(clip_norm=0.0) topk:feedback=adam(beta2=1.0)
    topk:feedback=none(clip_norm=True) topk:feedback=error(clip_norm=-1.0) topk:feedback=adam(eps=0.0)
"""


@pytest.mark.parametrize("text", _REPEATED.split())
def test_a_value_that_is_not_allowed_is_repeated(text: str) -> None:
    *_, last = re.split(r"[:(,]", text.rstrip(")"))
    with pytest.raises(ArgumentError, match=f"^{last} is not allowed: give "):
        parse_recipe(text)


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
        ("topk:density=linear(steps=4)", "unknown density 'linear'"),
        ("topk:schedule=linear()", "steps=None"),
        ("topk:densities={'a':2}", "densities.'a'.=2"),
        ("topk:density", "NAME:ARGUMENT=VALUE"),
        ("topk:density=x", "density='x'.*'auto'"),
        ("", "unknown compression ''"),
        ("topq", r"topq.*cltk, dgc, dragonn, exdyna, .*topk"),
        ("topk:densty=0.1", r"densty.*density, feedback, indices, quantum, "),
        ("topk:feedback=errors", "feedback 'errors'"),
        ("exdyna:rebalance=fast", "rebalance rule 'fast'"),
        ("micro:threshold=skech", "threshold rule 'skech'"),
        ("hard_threshold:threshold=sketch", "threshold='sketch'"),
        ("dgc:threshold=sketch", "threshold of dgc 'sketch'"),
        ("sidco:distribution=normal", "distribution 'normal'"),
        ("randomk:shared=no", "shared='no'"),
        ("topk:values=fp16", "write values 'fp16'.*bfloat16.*exact.*float16"),
        ("topk:indices=rice", "indices 'rice'.*block16, gaps, int32"),
        ("signsgd:values=float16", "values='float16'"),
        ("signsgd:vote=all", "of signsgd 'all'"),
        ("qsgd:norm=mean", "of qsgd 'mean'"),
        ("qsgd:density=0.01", "density=0.01.*1.0: qsgd sends every element, in 4 bits"),
        ("signsgd:vote=majority", "feedback=.*'none'.*outvote"),
        ("qsgd:norm=l2", "feedback=.*'none'.*7 levels of the L2 norm.*512 elements"),
        ("hard_threshold:density=auto", "no density decides what hard_threshold sends"),
        # 0.001, the least that "auto" would try, nobody has written
        ("signsgd:density=auto", "density='auto'.*give none: no density decides what signsgd"),
        ("topk:schedule=linear(steps=3,epochs=2,steps_per_epoch=5)", "either steps"),
        ("topk:schedule=stairs(steps=1,densities=())", "densities"),
    ],
)
def test_text_that_is_no_recipe(text: str, complaint: str) -> None:
    with pytest.raises(ArgumentError, match=complaint):
        parse_recipe(text)
