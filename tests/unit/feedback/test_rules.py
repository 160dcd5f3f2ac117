"""Dense parameters, and parameters of another density: which, and that they meet the same laws."""

import numpy as np
import pytest

from horovod_sparse.collectives import AllReduce
from horovod_sparse.feedback import MomentumCorrection, ParameterRules, Recipe, recipe
from horovod_sparse.merging import ParameterFacts, Plan, explicit_groups, fixed_bytes, num_buckets
from horovod_sparse.sparsifiers.dense import Dense
from horovod_sparse.sparsifiers.schedule import Exponential
from support import laws
from support.cases import CASES, Case, case_id
from support.gradients import DTYPES, dyadic
from support.history import Scenario, random_gradients, run
from support.sampling import rows_by


def test_the_first_rule_that_holds_decides() -> None:
    rules = ParameterRules(
        dense_below=100,
        dense="*.bias",  # type: ignore[arg-type]
        densities={"emb.bias": 0.5, "emb.*": 0.02},  # type: ignore[arg-type]
    )
    asked = [("emb.bias", 8), ("emb.weight", 8), ("fc.bias", 4096), ("fc.weight", 99), ("fc.weight", 100)]
    assert [rules.density_of(*one) for one in asked] == [0.5, 0.02, 1.0, 1.0, None]
    # names are compared whole, and capitals count
    assert ParameterRules(dense=("bias",)).density_of("fc.bias", 1) is None
    assert ParameterRules(dense=("*.Bias",)).density_of("fc.bias", 1) is None
    assert not ParameterRules()
    assert rules


def test_recipes_of_parameters() -> None:
    made = recipe(
        "dgc",
        density=0.001,
        schedule=Exponential(steps=10),
        feedback="momentum",
        dense=("*.bias",),
        densities={"emb.*": 0.02},
    )
    plain, dense, other = (made.for_parameter(name, 10) for name in ("w", "a.bias", "emb.weight"))
    assert plain == Recipe(made.sparsifier, made.feedback)
    assert dense == Recipe(Dense(), MomentumCorrection(masking=False))
    assert other.sparsifier == type(made.sparsifier)(density=0.02)
    assert other.feedback == made.feedback


@pytest.mark.parametrize("case", [case for case in CASES if not case.quantizes], ids=case_id)
def test_every_sparsifier_takes_another_density(case: Case) -> None:
    made = Recipe(case.recipe.sparsifier, case.recipe.feedback, ParameterRules(densities={"e*": 0.5}))  # type: ignore[arg-type]
    assert made.for_parameter("emb", 1000).sparsifier.density == 0.5
    assert made.for_parameter("fc", 1000).sparsifier == case.recipe.sparsifier


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


_FACTS = [
    ParameterFacts("emb", 1000, density=0.02),
    ParameterFacts("a.weight", 500),
    ParameterFacts("a.bias", 10, density=1.0),
    ParameterFacts("b.weight", 500),
    ParameterFacts("b.bias", 10, density=1.0),
]


@pytest.mark.parametrize(
    "plan",
    [fixed_bytes(_FACTS), num_buckets(_FACTS, 1), explicit_groups(_FACTS, [[fact.name for fact in _FACTS]])],
    ids=["fixed_bytes", "num_buckets", "explicit_groups"],
)
def test_no_bucket_mixes_densities(plan: Plan) -> None:
    plan.check(_FACTS)
    assert sorted(map(sorted, plan.buckets)) == [["a.bias", "b.bias"], ["a.weight", "b.weight"], ["emb"]]
