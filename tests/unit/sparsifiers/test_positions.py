"""Random-k's positions: every set of k as likely as any other."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from horovod_sparse.sparsifiers.randomk import draw_positions


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
