"""Every loop in every front end: as on mean gradients, or refused by name; every rank runs the same tests."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from horovod_sparse.errors import HorovodSparseError
from loops.way import LOOPS, WAYS, Loop, Training, close, table
from support.replicas import same_on_all_replicas

for _path in sorted(Path(__file__).parent.glob("[!t_]*.py")):
    if _path.stem not in ("conftest", "way"):
        importlib.import_module(f"loops.{_path.stem}")
#: each loop runs in one of them by day, by turns, and in all ways at night
BY_DAY = ("DDP", "DDP steps", "Horovod")
pytestmark = pytest.mark.usefixtures("process_group")


def run(loop: Loop, way: str, density: float | None) -> tuple[Training, list[torch.Tensor]]:
    torch.manual_seed(0)
    training = Training(way, density)
    more: Any = loop.train(training)
    return training, [*training.ends(), *(more or ())]


@functools.cache
def plainly(loop: Loop, way: str) -> list[torch.Tensor]:
    """Trains on mean gradients, once for several ways."""
    return run(loop, way, None)[1]


def by_day(number: int, loop: Loop, way: str) -> bool:
    if way not in BY_DAY:
        return False
    return bool(loop.words(way)) or (number + BY_DAY.index(way)) % 3 == 0


@pytest.mark.parametrize(
    ("loop", "way"),
    [
        pytest.param(
            loop,
            way,
            marks=[] if by_day(number, loop, way) else [pytest.mark.nightly],
            id=f"{loop.name}-{way}",
        )
        for number, loop in enumerate(LOOPS)
        for way in (*WAYS, "stock")
    ],
)
def test_a_loop_is_right_or_refused_by_name(loop, way):
    if Training(way, None).front in loop.without:
        pytest.skip("no such loop")
    if words := loop.words(way):
        with pytest.raises((HorovodSparseError, AssertionError), match=words):
            run(loop, way, 1.0)
        return
    expected = plainly(loop, loop.reference or ("DDP" if way == "DDP" else "module"))
    whole, found = run(loop, way, 1.0)
    assert same_on_all_replicas(*whole.ends())
    if whole.is_exact:
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            close(one, other, f"parameter {number}")
    part, _ = run(loop, way, 0.05)
    assert same_on_all_replicas(*part.ends())
    if loop.conserves:
        for recorder in part.recorders:
            if recorder.knows:
                recorder.check(part.size)


def test_the_table_of_refused_loops_is_that_of_the_documents():
    assert table() in Path(__file__).with_name("README.md").read_text()
