"""What descriptions accept, and that they are values."""

import pickle
from collections import Counter
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import recipe
from horovod_sparse.sparsifiers import ALGORITHMS, BucketInfo, RandomK
from horovod_sparse.sparsifiers.randomk import draw_positions


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
