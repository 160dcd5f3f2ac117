"""Saved state: as bytes, and at another number of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_sparse.errors import ArgumentError, StateMismatchError
from horovod_sparse.frontend.encoding import from_bytes, to_bytes
from horovod_sparse.frontend.state import redistributed, share_factor


@pytest.mark.parametrize(("old_size", "size"), [(2, 3), (3, 2), (4, 1), (1, 4), (2, 5), (5, 2), (3, 3)])
def test_mean_residual_is_kept(old_size, size):
    rng = np.random.default_rng(0)
    entries = [
        {
            "rank": rank,
            "size": old_size,
            "residuals": {"w": rng.normal(size=4)},
            "companions": [{"w": rng.normal(size=4)}],
        }
        for rank in range(old_size)
    ]
    made = [redistributed(entries[::-1], rank, size) for rank in range(size)]
    for pick in (lambda entry: entry["residuals"]["w"], lambda entry: entry["companions"][0]["w"]):
        before = np.mean([pick(entry) for entry in entries], axis=0)
        np.testing.assert_allclose(np.mean([pick(entry) for entry in made], axis=0), before, rtol=1e-12)
    # what `load` multiplies by is 1 then
    assert {share_factor(entry["rank"], entry["size"], size) for entry in made} == {1.0}


def test_entries_of_some_ranks_are_refused():
    entry = {"rank": 0, "size": 2, "residuals": {}, "companions": []}
    with pytest.raises(StateMismatchError, match=r"ranks \[0\]"):
        redistributed([entry], 0, 1)
    with pytest.raises(ArgumentError, match="rank=2"):
        redistributed([{**entry, "size": 1}], 2, 2)


def test_bytes_keep_types_and_bits():
    value = {
        "numbers": [1, 2.5, True, None, float("inf")],
        "tuple": (1, ("a", b"\x00\xff")),
        "arrays": {"f": np.array([[1e-45, -0.0]], np.float32), "u": np.array([2**63], np.uint64)},
        "tree": {},
    }
    back = from_bytes(to_bytes(value))
    assert back["numbers"] == value["numbers"]
    assert back["tuple"] == value["tuple"]
    assert back["tree"] == {}
    for name, array in value["arrays"].items():
        assert back["arrays"][name].dtype == array.dtype
        assert back["arrays"][name].tobytes() == array.tobytes()


def test_what_cannot_be_saved_or_read_is_refused():
    with pytest.raises(StateMismatchError, match="object"):
        to_bytes({"it": object()})
    for data in (b"nonsense", b"", to_bytes({"a": np.ones(100)})[:-50]):
        with pytest.raises(StateMismatchError, match="cannot be read"):
            from_bytes(data)
