"""What descriptions accept, and that they are values."""

import pickle
from collections import Counter
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.feedback import parse_recipe, recipe
from horovod_sparse.sparsifiers import ALGORITHMS, BucketInfo, RandomK
from horovod_sparse.sparsifiers.randomk import draw_positions
from support.cases import CASES, Case, case_id


@pytest.mark.parametrize("name", ALGORITHMS)
def test_density_is_a_fraction(name: str) -> None:
    wrong: list[Any] = [0, -0.1, 1.0001, 5, float("nan"), float("inf"), "0.1", None, True]
    for density in wrong:
        with pytest.raises(ArgumentError, match=r"density=.*\(0, 1\]"):
            recipe(name, density=density)


@pytest.mark.parametrize(
    ("name", "arguments", "complaint"),
    [
        ("topk", {"quantum": 0}, "quantum=0"),
        ("exdyna", {"rebalance": "fast"}, "rebalance rule 'fast'"),
        ("exdyna", {"alpha": 0.9}, "alpha=0.9"),
        ("exdyna", {"blocks_per_move": 1.0}, "blocks_per_move=1.0"),
        ("micro", {"threshold": "skech"}, "threshold rule 'skech'"),
        ("micro", {"threshold": 0.5}, "threshold=0.5"),
        ("topk", {"feedback": "errors"}, "feedback 'errors'"),
        ("randomk", {"shared": "no"}, "shared='no'"),
        ("randomk", {"seed": -1}, "seed=-1"),
        ("topk", {"values": "int7"}, "write values 'int7'"),
        ("topk", {"indices": "int16"}, "indices 'int16'"),
        ("hard_threshold", {"threshold": 0.0}, "threshold=0.0"),
        ("hard_threshold", {"threshold": "sketch"}, "threshold='sketch'"),
        ("dgc", {"sample_fraction": 1.5}, "sample_fraction=1.5"),
        ("dgc", {"threshold": "sketch"}, "threshold of dgc 'sketch'"),
        ("dragonn", {"slots_per_selected": 0}, "slots_per_selected=0"),
        ("mstopk", {"num_passes": 0}, "num_passes=0"),
        ("sidco", {"distribution": "normal"}, "distribution 'normal'"),
        ("sidco", {"first_density": 1.0}, "first_density=1.0"),
        ("sidco", {"adapt_every": 0}, "adapt_every=0"),
    ],
)
def test_a_wrong_argument_is_named(name: str, arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ArgumentError, match=complaint):
        recipe(name, **arguments)


def test_a_misspelt_name_brings_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"densty.*density, feedback, indices, quantum, "):
        recipe("topk", densty=0.1)
    with pytest.raises(UnknownNameError, match=r"topq.*cltk, dgc, dragonn, exdyna, .*topk"):
        recipe("topq")


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_description_survives_pickle_and_text(case: Case) -> None:
    assert pickle.loads(pickle.dumps(case.recipe)) == case.recipe
    assert hash(case.recipe) == hash(pickle.loads(pickle.dumps(case.recipe)))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("topk:density", "NAME:ARGUMENT=VALUE"),
        ("topk:density=x", "density='x'"),
        ("", "unknown compression ''"),
    ],
)
def test_text_that_is_no_recipe(text: str, complaint: str) -> None:
    with pytest.raises(ArgumentError, match=complaint):
        parse_recipe(text)


def test_truth_may_be_written_in_small_letters() -> None:
    made = [parse_recipe(f"randomk:shared={text}").sparsifier for text in ("false", "False", "true", "True")]
    assert [one.shared for one in made] == [False, False, True, True]  # type: ignore[attr-defined]


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


@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 0), (7, 7), (1000, 999), (1000, 500), (10**6, 10)])
def test_they_are_ascending_unique_and_inside(n: int, k: int) -> None:
    drawn = draw_positions(np.random.default_rng(0), n, k)
    assert drawn.dtype == np.int32 and drawn.size == k
    assert (np.diff(drawn) > 0).all()
    assert drawn.size == 0 or (drawn[0] >= 0 and drawn[-1] < n)
