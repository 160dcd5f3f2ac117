"""Numbers that a user gives: what is refused, and in which words."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from horovod_sparse.checks import check_count, check_density, check_number, check_seconds
from horovod_sparse.errors import ArgumentError

NO_NUMBERS: list[Any] = [True, None, "1", [1], math.nan, 1j]


def refused(check: Callable[..., None], value: object, **bounds: Any) -> bool:
    try:
        check("name", value, "these words", **bounds)
    except ArgumentError as error:
        assert (error.argument, error.given, error.allowed) == ("name", value, "these words")
        return True
    return False


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_what_is_no_number_is_refused_everywhere(value: object) -> None:
    for check in (check_count, check_density, check_seconds):
        assert refused(check, value)
    assert refused(check_number, value, low=-2.0, high=2.0)


def test_bounds_count_as_they_are_asked_to() -> None:
    for value, taken in ((0, False), (1, True), (np.int64(3), True), (1.0, False), (-1, False)):
        assert refused(check_count, value) is not taken
    assert not refused(check_count, 0, low=0)
    for value, taken in ((0.0, False), (1e-9, True), (1, True), (1.0001, False), (np.float32(0.5), True)):
        assert refused(check_density, value) is not taken
    for value, taken in ((0, True), (1e9, True), (math.inf, False), (-1e-9, False)):
        assert refused(check_seconds, value) is not taken
    for low, high in ((True, True), (False, True), (True, False), (False, False)):
        ends = {"low": 1.0, "high": 2.0, "include_low": low, "include_high": high}
        assert refused(check_number, 1.0, **ends) is not low
        assert refused(check_number, 2, **ends) is not high
        assert not refused(check_number, 1.5, **ends)


def test_a_count_says_its_own_bound() -> None:
    with pytest.raises(ArgumentError, match=r"^steps=1 is not allowed: give a whole number, 2 or more$"):
        check_count("steps", 1, low=2)
