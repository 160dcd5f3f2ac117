"""Facts that ranks tell each other in every exchange of steps, and averages of buffers."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from horovod_sparse.collectives import AllReduce, Synchronization, gather_values
from horovod_sparse.errors import NonFiniteGradientError, StateMismatchError


class Averaged(Protocol):
    """Numbers of a model without gradients (batch statistics), which exchanges average over ranks."""

    def read(self) -> np.ndarray:
        """Returns all numbers as one float64 array, of the same length on all ranks."""

    def move(self, sent: np.ndarray, mean: np.ndarray) -> None:
        """Adds mean minus `sent` to the present numbers, so that changes made since `read` stay."""


def mean_of_finite(own: np.ndarray) -> Synchronization[np.ndarray]:
    """Returns the mean over those ranks whose numbers are all finite."""
    sent = np.append(own, 1.0) if np.isfinite(own).all() else np.zeros(own.size + 1)
    total = np.asarray((yield AllReduce(sent)))
    return total[:-1] / total[-1] if total[-1] else own


def check_same_exchange(numbers: Sequence[int]) -> None:
    """Raises if ranks are not at the same exchange; `numbers` is the exchange's number on each rank."""
    if len(set(numbers)) > 1:
        told = ", ".join(f"rank {rank} at {number}" for rank, number in enumerate(numbers))
        raise StateMismatchError(
            f"ranks are not at the same exchange: {told}. Each rank has to call optimizer.step() equally "
            "often, and end its training with finish()"
        )


@dataclass
class RankFacts:
    """A rank's report that goes with each exchange: NaN or Inf, present gradients, weight decay."""

    #: 1 + number of the first parameter with a gradient that was not finite; 0 where all were
    bad: int = 0
    finishing: bool = False
    #: which parameters had a gradient: a bit for each, by number
    present: int = 0
    #: factor of weight decay, by part
    shrink: list[float] = field(default_factory=list)
    #: projections of gradients for `RankSimilarity`, by pass and part
    projections: list[list[float]] = field(default_factory=list)
    task: Any = None
    averaged: tuple[np.ndarray, Any] | None = None

    @property
    def all_finish(self) -> bool:
        """True if every rank has sent this exchange from `finish()`; read once it has arrived."""
        return self.task is not None and self.task.error is None and all(one[1] for one in self.task.result)

    def gather(self, number: int) -> Synchronization[list[Any]]:
        """Gathers facts of exchange `number`, always of one length: Horovod negotiates others anew."""
        shrink, *projections = ([f"{one:+.16e}" for one in some] for some in (self.shrink, *self.projections))
        return gather_values([number, self.finishing, self.bad, hex(self.present), shrink, projections])


def present_bits(parts: Sequence[Any]) -> int:
    """Returns an integer in which bit i is 1 if parameter i has a gradient."""
    pairs = [(range(len(part.names)), set(part.absent)) for part in parts]
    here = [number not in absent for numbers, absent in pairs for number in numbers]
    return sum(1 << number for number, is_here in enumerate(here) if is_here)


def read_facts(parts: Sequence[Any], sent: Sequence[Any]) -> list[dict[float, list[int]]]:
    """Updates similarities by all ranks' facts; returns {decay: parameter numbers} by part."""
    numbers, _, marks, present, shrink, projections = zip(*sent, strict=True)
    check_same_exchange(numbers)
    names = [name for part in parts for name in part.names]
    if bad := {rank: names[mark - 1] for rank, mark in enumerate(marks) if mark}:
        raise NonFiniteGradientError(next(iter(bad.values())), bad)
    for of_ranks in zip(*projections, strict=False):  # a rank that has had fewer batches ends earlier
        for part, told in zip(parts, zip(*of_ranks, strict=True), strict=True):
            part.bucket.update_similarity(np.array(told, float))
    somewhere, first = functools.reduce(operator.or_, (int(bits, 16) for bits in present)), 0
    shrunk: list[dict[float, list[int]]] = []
    for part, factors in zip(parts, zip(*shrink, strict=True), strict=True):
        factor = min(map(float, factors))  # a rank that has had fewer batches shrinks as often as the others
        here = [number for number in range(len(part.names)) if somewhere >> first + number & 1]
        shrunk.append({factor: here} if factor != 1.0 and here else {})
        first += len(part.names)
    return shrunk
