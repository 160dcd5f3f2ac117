"""Checks of numbers that a user gives: whole numbers, densities, seconds, numbers in an interval.

Each refuses with the argument's name, what was given, and what is allowed. True and False are no numbers.
"""

from __future__ import annotations

import numpy as np

from horovod_sparse.errors import ArgumentError


def check_number(argument: str, value: object, allowed: str, within: str = "(0, inf]") -> None:
    """Raises an `ArgumentError` unless the value is a number in the interval; a bracket includes its end.

    Example:
        >>> check_number("momentum", 0, "a number in [0, 1)", "[0, 1)")
    """
    low, high = map(float, within[1:-1].split(","))
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    ends = {low} if within[0] == "[" else set()
    ends |= {high} if within[-1] == "]" else set()
    if not is_number or not (low < value < high or value in ends):  # type: ignore[operator]
        raise ArgumentError(argument, value, allowed)


def check_density(argument: str, value: object, allowed: str = "a density in (0, 1]") -> None:
    check_number(argument, value, allowed, "(0, 1]")


def check_seconds(
    argument: str, value: object, allowed: str = "a finite number of seconds, 0 or more"
) -> None:
    check_number(argument, value, allowed, "[0, inf)")


def check_count(argument: str, value: object, allowed: str = "", *, low: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
        raise ArgumentError(argument, value, allowed or f"a whole number, {low} or more")


def whole_number(text: str) -> int:
    """Returns the whole number that a user's text means, or -1 if it means none.

    "²" is a digit and no number, and a number may have too many digits: `str.isdigit` knows neither.

    Example:
        >>> whole_number(" 12 "), whole_number("²"), whole_number("1.5")
        (12, -1, -1)
    """
    try:
        return int(text)
    except ValueError:
        return -1
