"""Whole products of cases, of which the default runs a sample and `nightly` the rest."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def named(value: Any) -> str:
    return getattr(value, "__name__", str(value))


def rows_by(
    names: str,
    rows: Iterable[Any],
    *axes: Iterable[Any],
    ids: Callable[[Any], str] | None = None,
    each: int = 1,
) -> pytest.MarkDecorator:
    """Parametrizes by rows x axes: by default every row `each` times, with the combinations of axes in turn.

    With more rows than combinations each combination has rows, too. No row is ever left out.
    """
    rows, combinations = list(rows), list(itertools.product(*axes))
    stride, made = -(-len(combinations) // each), []
    for number, row in enumerate(rows):
        for turn, combination in enumerate(combinations):
            marks = [] if (turn - number) % len(combinations) % stride == 0 else [pytest.mark.nightly]
            words = [ids(row) if ids else named(row), *map(named, combination)]
            made.append(pytest.param(row, *combination, marks=marks, id="-".join(words)))
    return pytest.mark.parametrize(names, made)


def rest_nightly(values: Iterable[Any], default: Iterable[Any]) -> list[Any]:
    """Values of a parametrization (tuples, of several arguments), of which the default runs these alone."""
    default, found = list(default), []
    for value in values:
        given = value if isinstance(value, tuple) else (value,)
        found.append(pytest.param(*given, marks=[] if value in default else [pytest.mark.nightly]))
    return found
