"""docs/algorithms.md says what the code does: names, defaults, and texts that can be given as they stand."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from horovod_sparse.feedback import parse_recipe
from horovod_sparse.sparsifiers import ALGORITHMS, Sparsifier
from horovod_sparse.sparsifiers.base import value_text
from horovod_sparse.wire import WireFormat

_TEXT = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
_SECTIONS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", _TEXT, re.MULTILINE | re.DOTALL))
_COMMON = {item.name for item in dataclasses.fields(Sparsifier)}


def test_every_algorithm_is_there() -> None:
    assert set(_SECTIONS) == set(ALGORITHMS)


@pytest.mark.parametrize("name", _SECTIONS)
def test_arguments_and_defaults(name: str) -> None:
    written = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", _SECTIONS[name], re.MULTILINE))
    own = [item for item in dataclasses.fields(ALGORITHMS[name]) if item.name not in _COMMON]
    assert written == {item.name: value_text(item.default) for item in own}


_RECIPES = [
    line
    for block in re.findall(r"```recipe\n(.*?)```", _TEXT, re.DOTALL)
    for line in block.strip().splitlines()
]


@pytest.mark.parametrize("text", _RECIPES)
def test_recipes_can_be_given_as_they_stand(text: str) -> None:
    assert parse_recipe(parse_recipe(text).describe()) == parse_recipe(text)


def test_bytes_per_element() -> None:
    rows = re.findall(r"^\| `values=(\w+)`[^|]*\|(.*)\|$", _TEXT, re.MULTILINE)
    assert [name for name, _ in rows] == ["exact", "float16", "int8", "2bit"]
    for values, cells in rows:
        for indices, cell in zip(("int32", "block16", "gaps"), cells.split("|"), strict=True):
            found = [float(number) for number in re.findall(r"[\d.]+", cell)]
            counts = (25_600, 256_000)
            wire = WireFormat(values, indices)
            expected = [round(wire.message_bytes(k, 25_600_000, "float32") / k, 2) for k in counts]
            assert found == expected
