"""What descriptions accept, and that they are values."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.feedback import parse_recipe, recipe
from horovod_sparse.sparsifiers import ALGORITHMS, BucketInfo, RandomK
from support.cases import CASES, Case, case_id


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("density", [0, 0.0, -0.1, 1.0001, 5, float("nan"), float("inf"), "0.1", None, True])
def test_density_is_a_fraction(name: str, density: Any) -> None:
    with pytest.raises(ArgumentError, match=r"density=.*\(0, 1\]"):
        recipe(name, density=density)


@pytest.mark.parametrize(
    ("name", "arguments", "complaint"),
    [
        ("topk", {"quantum": 0}, "quantum=0"),
        ("topk", {"quantum": 1.5}, "quantum=1.5"),
        ("topk", {"quantum": True}, "quantum=True"),
        ("exdyna", {"rebalance": "fast"}, "rebalance rule 'fast'"),
        ("exdyna", {"alpha": 0.9}, "alpha=0.9"),
        ("exdyna", {"num_blocks": 0}, "num_blocks=0"),
        ("exdyna", {"blocks_per_move": 1.0}, "blocks_per_move=1.0"),
        ("micro", {"threshold": "skech"}, "threshold rule 'skech'"),
        ("micro", {"threshold": 0.5}, "threshold=0.5"),
        ("micro", {"threshold": None}, "threshold=None"),
        ("topk", {"feedback": "errors"}, "feedback 'errors'"),
        ("topk", {"feedback": None}, "feedback=None"),
        ("randomk", {"shared": "no"}, "shared='no'"),
        ("randomk", {"seed": -1}, "seed=-1"),
        ("randomk", {"seed": 0.5}, "seed=0.5"),
        ("topk", {"values": "int7"}, "write values 'int7'"),
        ("topk", {"indices": "int16"}, "indices 'int16'"),
        ("hard_threshold", {"threshold": 0.0}, "threshold=0.0"),
        ("hard_threshold", {"threshold": -1.0}, "threshold=-1.0"),
        ("hard_threshold", {"threshold": float("nan")}, "threshold=nan"),
        ("hard_threshold", {"threshold": "sketch"}, "threshold='sketch'"),
        ("dgc", {"sample_fraction": 0.0}, "sample_fraction=0.0"),
        ("dgc", {"sample_fraction": 1.5}, "sample_fraction=1.5"),
        ("dgc", {"sample_fraction": "all"}, "sample_fraction='all'"),
        ("dgc", {"sample_fraction": True}, "sample_fraction=True"),
        ("dgc", {"threshold": "sketch"}, "threshold of dgc 'sketch'"),
        ("dgc", {"threshold": 0.5}, "threshold of dgc '0.5'"),
        ("dgc", {"seed": -1}, "seed=-1"),
        ("dragonn", {"slots_per_selected": 0}, "slots_per_selected=0"),
        ("dragonn", {"slots_per_selected": -2.0}, "slots_per_selected=-2.0"),
        ("dragonn", {"slots_per_selected": float("inf")}, "slots_per_selected=inf"),
        ("dragonn", {"sample_fraction": 0}, "sample_fraction=0"),
        ("dragonn", {"seed": "x"}, "seed='x'"),
        ("mstopk", {"num_passes": 0}, "num_passes=0"),
        ("mstopk", {"num_passes": 2.5}, "num_passes=2.5"),
        ("sidco", {"distribution": "normal"}, "distribution 'normal'"),
        ("sidco", {"first_density": 1.0}, "first_density=1.0"),
        ("sidco", {"first_density": 0}, "first_density=0"),
        ("sidco", {"tolerance": None}, "tolerance=None"),
        ("sidco", {"adapt_every": 0}, "adapt_every=0"),
        ("sidco", {"max_stages": True}, "max_stages=True"),
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
    assert parse_recipe(case.recipe.describe()).sparsifier == case.recipe.sparsifier
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


@pytest.mark.parametrize(("text", "shared"), [("false", False), ("False", False), ("true", True)])
def test_truth_may_be_written_in_small_letters(text: str, shared: bool) -> None:
    made = parse_recipe(f"randomk:shared={text}").sparsifier
    assert isinstance(made, RandomK)
    assert made.shared is shared


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


def test_random_positions_are_uniform() -> None:
    info = BucketInfo("w", 40)
    drawn = np.concatenate([RandomK(density=0.25).positions(info, step) for step in range(2000)])
    counts = np.bincount(drawn, minlength=40)
    # 2000 draws of 10 out of 40: mean 500, standard deviation sqrt(2000 * 0.25 * 0.75) = 19.4
    assert np.abs(counts - 500).max() < 5 * 19.4
