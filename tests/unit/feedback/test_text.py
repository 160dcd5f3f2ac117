"""Recipes as text: every row, nested values, and what is no recipe."""

import pickle
import re
from typing import Any

import numpy as np
import pytest

from horovod_sparse.collectives import AllReduce
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
from horovod_sparse.simulation import SimulatedCluster, run_lockstep
from horovod_sparse.sparsifiers.dense import Dense
from horovod_sparse.sparsifiers.dgc import DGC
from horovod_sparse.sparsifiers.schedule import Exponential, Stairs
from horovod_sparse.sparsifiers.topk import TopK
from support import laws
from support.cases import CASES, Case, case_id
from support.gradients import DTYPES, dyadic, layered
from support.laws import Scenario, random_gradients, run
from support.sampling import rows_by


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_every_row_as_text_and_pickled(case: Case) -> None:
    for again in (parse_recipe(case.recipe.describe()), pickle.loads(pickle.dumps(case.recipe))):
        assert again == case.recipe and hash(again) == hash(case.recipe)


_FEEDBACKS = [
    ErrorFeedback(),
    ErrorFeedback(clip_norm=0.5),
    NoFeedback(),
    AdamFeedback(beta2=0.99, clip_norm=1.0, whole_batch=False),
    RMSpropFeedback(eps=1e-4),
    MomentumCorrection(),
    MomentumCorrection(momentum=0.5, nesterov=True, masking=False, clip_norm=1.5),
]
_SCHEDULES = [None, Exponential(steps=100, start=0.5), Stairs(steps=9), Stairs(steps=3, densities=(0.5, 0.1))]
_RULES = [
    ParameterRules(),
    ParameterRules(dense_below=1024),
    ParameterRules(dense=("*.bias", "norm[12].*")),
    ParameterRules(densities={"embedding.*": 0.01, "a,b": 1.0}, dense_below=3),  # type: ignore[arg-type]
]


@rows_by("feedback,schedule,rules", _FEEDBACKS, _SCHEDULES, _RULES, each=6)
def test_a_recipe_written_as_text_is_read_back(feedback: Any, schedule: Any, rules: ParameterRules) -> None:
    made = Recipe(DGC(density=0.02, schedule=schedule, seed=3), feedback, rules)
    assert parse_recipe(made.describe()) == made


def test_texts_are_parsed_to_recipes() -> None:
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
    assert recipe("topk", schedule="stairs(steps=3)").sparsifier.schedule == Stairs(steps=3)
    assert recipe("topk", feedback="momentum(nesterov=true)").feedback == MomentumCorrection(nesterov=True)
    assert parse_recipe("topk:dense=*.bias").rules.dense == ("*.bias",)
    for truth in ("false", "False", "true", "True"):
        given = parse_recipe(f"topk:feedback=adam(whole_batch={truth})").feedback
        assert given == AdamFeedback(whole_batch=truth in ("true", "True"))
    assert parse_recipe("qsgd:group=96,levels=127") == recipe("qsgd", group=96, levels=127)


@pytest.mark.parametrize(
    ("steps", "density"), [(300, 0.0025), (1000, 0.005), (3000, 0.003), (6000, 0.0015), (100_000, 0.0009)]
)
def test_best_takes_density_and_messages_from_the_number_of_steps(steps: int, density: float) -> None:
    text = f"topk:density={density},values=2bit,indices=gaps,feedback=adam"
    made = recipe("best", steps=steps)
    assert made == parse_recipe(f"best:steps={steps}") == parse_recipe(made.describe()) == parse_recipe(text)
    assert parse_recipe(f"best:steps={steps},density=0.5,values=exact").sparsifier.density == 0.5


#: what is wrong is repeated as it stands, text in quotes: the last argument
_REPEATED = """
    exdyna:num_blocks=1.5
    randomk:seed=-1 hard_threshold:threshold=0.0 dgc:sample_fraction=1.5 dragonn:slots_per_selected=0
    mstopk:num_passes=0 sidco:seed=-1 qsgd:levels=128 signsgd:group=33
    topk:schedule=0.1 topk:schedule=exponential(steps=3,start=0.0) topk:schedule=stairs(steps=1,densities=0.1)
    topk:feedback=momentum(momentum=2) topk:feedback=momentum(clip_norm=0.0) topk:feedback=adam(beta2=1.0)
    topk:feedback=none(clip_norm=True) topk:feedback=error(clip_norm=-1.0) topk:feedback=adam(eps=0.0)
    topk:feedback=error(clip_norm=nan) spardl:teams=0 spardl:teams=1e400 qsgd:levels=1,group=0
    topk:density=x topk:density=atuo hard_threshold:threshold=sketch signsgd:values=float16
    topk:feedback=adam(whole_batch=no) best:steps=0 best:steps=1.5
"""
#: and a name that is not known, with those that are
_UNKNOWN = """
    topq exdyna:rebalance=fast micro:threshold=skech micro:threshold=0.5
    topk:feedback=errors topk:values=fp16 topk:indices=rice spardl:between=all
"""


@pytest.mark.parametrize("text", (_REPEATED + _UNKNOWN).split())
def test_a_refused_value_is_repeated_in_the_error(text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse_recipe(text)
    if text in _UNKNOWN.split():
        word = re.split("[:=]", text)[-1]
        assert re.match(rf"unknown .*'{word}': the known ones are \w+, ", str(caught.value))
        return
    name, _, value = re.split(r"[:(,]", text.rstrip(")"))[-1].partition("=")
    value = {"1e400": "inf"}.get(value, value)
    assert re.match(rf"{name}='?{re.escape(value)}'? is not allowed: give ", str(caught.value))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("topk:schedule=exponential(steps=400", "closed"),
        ("topk:dense=('*.bias)", "closed"),
        ("topk:density=0.1,density=0.2", "density only once"),
        ("topk:schedule=expontial(steps=4)", "unknown schedule 'expontial'.*exponential, stairs"),
        ("topk:schedule=stairs(stps=4)", "argument of stairs 'stps'.*steps"),
        ("topk:densities={'a':2}", "densities.'a'.=2"),
        ("topk:density", "NAME:ARGUMENT=VALUE"),
        ("topk:density=auto(least=0.01)", r"density='auto\(least=0\.01\)'.* a number such as 0\.01"),
        ("", "unknown compression ''"),
        ("topk:densty=0.1", r"densty.*density, feedback, indices, schedule, "),
        ("qsgd:density=0.01", "density=0.01.*1.0: qsgd sends every element, in 4 bits"),
        ("topk:schedule=stairs(steps=1,densities=())", "densities"),
    ],
)
def test_text_that_is_no_recipe(text: str, complaint: str) -> None:
    with pytest.raises(ArgumentError, match=complaint):
        parse_recipe(text)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_norms_are_those_of_the_residuals(case: Case) -> None:
    """Also where every second time some elements have no gradient; and then nothing is lost."""
    scenario = Scenario(3, 3000, num_steps=5)
    cluster, left, carried = scenario.cluster(case.recipe), np.zeros(3000), [0.0, 0.0, 0.0]
    for step, gradients in enumerate(random_gradients(scenario, layered).astype(np.float32)):
        given = enumerate(zip(cluster.buckets, gradients, strict=True), step)
        gradients[1 - step % 2 :: 2, :500] = 0.0
        sums = run_lockstep([one.step(own, absent=[(0, 500)] * (turn % 2)) for turn, (one, own) in given])
        for bucket in cluster.buckets:
            bucket.accept()
        left += np.sum(gradients, 0, np.float64) - cluster.dense(sums[0])
        if not case.loses_mass:  # a test of its own has the sum of residuals
            np.testing.assert_allclose(np.sum(cluster.residuals(), 0, np.float64), left, atol=1e-2)
        # Eq. (1): the mean over ranks of what they held when the step began; of 8 bits in the message
        for bucket in cluster.buckets:
            assert bucket.last.global_error == pytest.approx(float(np.mean(carried)), rel=1 / 256)
        held = [float(np.linalg.norm(residual.astype(np.float64))) for residual in cluster.residuals()]
        for bucket, norm in zip(cluster.buckets, held, strict=True):
            assert bucket.last.residual_norm == pytest.approx(norm, rel=1e-3)
            assert bucket.last.fold_seconds > 0.0 and bucket.last.select_seconds > 0.0
        carried = [0.0, 0.0, 0.0] if case.loses_mass else held


def test_an_accepted_step_is_not_abandoned() -> None:
    cluster = SimulatedCluster(recipe("topk", density=0.25), 4, 1)
    cluster.synchronize([np.array([4, 3, 0, 0], np.float32)])
    cluster.buckets[0].accept()
    cluster.buckets[0].abandon()
    assert cluster.residuals()[0].tolist() == [0, 3, 0, 0]


def test_the_first_rule_that_holds_decides() -> None:
    rules = ParameterRules(100, "*.bias", {"emb.bias": 0.5, "emb.*": 0.02})  # type: ignore[arg-type]
    asked = [("emb.bias", 8), ("emb.weight", 8), ("fc.bias", 4096), ("fc.weight", 99), ("fc.weight", 100)]
    assert [rules.density_of(*one) for one in asked] == [0.5, 0.02, 1.0, 1.0, None]
    # names are compared whole, and capitals count
    assert ParameterRules(dense=("bias",)).density_of("fc.bias", 1) is None
    assert ParameterRules(dense=("*.Bias",)).density_of("fc.bias", 1) is None


def test_recipes_of_parameters() -> None:
    made = parse_recipe(
        "dgc:schedule=stairs(steps=9),feedback=momentum,dense=*.bias,densities={'emb.*':0.02}"
    )
    plain, dense, other = (made.for_parameter(name, 10) for name in ("w", "a.bias", "emb.weight"))
    assert plain == Recipe(made.sparsifier, made.feedback)
    assert dense == Recipe(Dense(), MomentumCorrection(masking=False))
    assert other.sparsifier == type(made.sparsifier)(density=0.02)
    assert other.feedback == made.feedback


@rows_by("dtype,size", DTYPES, [1, 3])
def test_dense_meets_the_laws(dtype: str, size: int) -> None:
    scenario = Scenario(size, 37, dtype)
    gradients = random_gradients(scenario, dyadic)
    case = Case(Recipe(Dense()), same_indices=True)
    history = run(case.recipe, scenario, gradients)
    laws.check_all(history, case, exactly=True)
    for number, step in enumerate(gradients):
        np.testing.assert_array_equal(history.dense(number), step.sum(0))
    assert history.steps[0].recorder.kinds == [AllReduce]
