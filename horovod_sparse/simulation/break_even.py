"""Where one of two things begins to be the faster one."""

from __future__ import annotations

import math
from collections.abc import Callable

from horovod_sparse.errors import ArgumentError

__all__ = ["break_even"]


def break_even(
    speedup: Callable[[float], float],
    low: float,
    high: float,
    *,
    num_points: int = 13,
    precision: float = 0.005,
) -> list[float]:
    """Values between two limits at which a speedup passes 1.

    Looks at points that are evenly spaced in the logarithm, then halves every piece between two of them
    at which another one is faster. Two crossings within one piece are not seen.

    Args:
        speedup: of a value; above 1, the first of two things is faster.
        low: above 0.
        high: above `low`.
        num_points: 2 or more.
        precision: relative.

    Raises:
        ArgumentError: limits or number are of another kind.

    Example:
        >>> [round(value, 1) for value in break_even(lambda x: 10.0 / x, 1.0, 100.0, precision=0.001)]
        [10.0]
    """
    if not 0.0 < low < high:
        raise ArgumentError("low and high", (low, high), "two numbers above 0, the smaller first")
    if num_points < 2:
        raise ArgumentError("num_points", num_points, "2 or more")
    step = (math.log(high) - math.log(low)) / (num_points - 1)
    values = [math.exp(math.log(low) + number * step) for number in range(num_points)]
    values[-1] = high  # not beyond it by rounding
    faster = [speedup(value) > 1.0 for value in values]
    found = []
    for number in range(num_points - 1):
        if faster[number] == faster[number + 1]:
            continue
        left, right = values[number], values[number + 1]
        while right / left > 1.0 + precision:
            middle = math.sqrt(left * right)
            if (speedup(middle) > 1.0) == faster[number]:
                left = middle
            else:
                right = middle
        found.append(math.sqrt(left * right))
    return found
