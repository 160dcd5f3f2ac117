"""Law 6 for another number of ranks: the mean residual is kept exactly."""

import numpy as np
import pytest
import torch

from horovod_sparse.errors import ArgumentError, StateMismatchError
from horovod_sparse.torch.state import redistribute


def entries(size):
    generator = np.random.default_rng(size)
    return [
        {
            "rank": rank,
            "size": size,
            "residuals": {name: torch.from_numpy(generator.standard_normal(5)) for name in "ab"},
            "companions": [{"a": torch.from_numpy(generator.standard_normal(5))}],
        }
        for rank in range(size)
    ]


def mean(many, pick):
    return sum(pick(entry) for entry in many) / len(many)


@pytest.mark.parametrize("old_size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_the_mean_over_ranks_is_kept(old_size, size):
    old = entries(old_size)
    new = [redistribute(old[::-1], rank, size) for rank in range(size)]
    picks = [lambda e: e["residuals"]["a"], lambda e: e["residuals"]["b"], lambda e: e["companions"][0]["a"]]
    for pick in picks:
        torch.testing.assert_close(mean(new, pick), mean(old, pick))
    assert [(entry["rank"], entry["size"]) for entry in new] == [(rank, size) for rank in range(size)]
    # a state of the sparsifier is only kept where nothing changed
    assert all(bool(entry.get("resized")) == (size != old_size) for entry in new)


def test_the_old_entries_are_left_alone():
    old = entries(4)
    before = [entry["residuals"]["a"].clone() for entry in old]
    redistribute(old, 0, 2)
    assert all(torch.equal(entry["residuals"]["a"], copy) for entry, copy in zip(old, before, strict=True))


def test_missing_and_foreign_entries_are_refused():
    with pytest.raises(StateMismatchError, match="every rank"):
        redistribute(entries(3)[:2], 0, 2)
    with pytest.raises(StateMismatchError, match="every rank"):
        redistribute([*entries(2), entries(3)[2]], 0, 2)
    with pytest.raises(ArgumentError, match="rank"):
        redistribute(entries(2), 4, 4)
