"""Checks of numbers that a user gives: whole numbers, densities, seconds, and what lies between two bounds.

Each refuses with the argument's name, what was given, and what is allowed. True and False are no numbers.
"""

from __future__ import annotations

import math
import sys

import numpy as np

from horovod_sparse.errors import ArgumentError

#: positive numbers that a state may hold
SMALLEST, LARGEST = sys.float_info.min, sys.float_info.max
#: more than a training takes; whole numbers beyond are no floats
MOST_STEPS = 2**53


def check_number(
    argument: str,
    value: object,
    allowed: str,
    *,
    low: float,
    high: float,
    include_low: bool = False,
    include_high: bool = True,
) -> None:
    """Refuses a number outside (low, high]."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ArgumentError(argument, value, allowed)
    above = low <= value if include_low else low < value
    below = value <= high if include_high else value < high
    if not (above and below):
        raise ArgumentError(argument, value, allowed)


def check_density(argument: str, value: object, allowed: str = "a density in (0, 1]") -> None:
    check_number(argument, value, allowed, low=0.0, high=1.0)


def check_seconds(
    argument: str, value: object, allowed: str = "a finite number of seconds, 0 or more"
) -> None:
    check_number(argument, value, allowed, low=0.0, high=math.inf, include_low=True, include_high=False)


def check_count(argument: str, value: object, allowed: str = "", *, low: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
        raise ArgumentError(argument, value, allowed or f"a whole number, {low} or more")


def whole_number(text: str) -> int:
    """Reads a whole number from a text that a user wrote; -1 if it is none.

    "²" is a digit and no number, and a number may have too many digits: `str.isdigit` knows neither.

    Example:
        >>> whole_number(" 12 "), whole_number("²"), whole_number("1.5")
        (12, -1, -1)
    """
    try:
        return int(text)
    except ValueError:
        return -1


def out_of_range(fields: object, **limits: tuple[float, float]) -> str:
    """Names a field of a loaded state that cannot have been saved; empty if none.

    Example:
        >>> from horovod_sparse.sparsifiers import SparsifierState
        >>> out_of_range(SparsifierState(step=-1), step=(0, 9))
        'step is -1, not from 0 to 9'
    """
    for name, (low, high) in limits.items():
        value = getattr(fields, name)
        if not low <= value <= high:
            return f"{name} is {value}, not from {low:g} to {high:g}"
    return ""
