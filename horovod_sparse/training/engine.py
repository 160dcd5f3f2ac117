"""Protocols between a front end and `Training`: an `Engine` knows arrays, parameters and the other ranks.

A new front end (another framework, or other collectives than Horovod's) writes

* an `Engine`, and parts derived from `BucketPart`: they alone know where arrays are. `carry_out` below turns
  a function that carries out one request into its method of that name;
* a subclass of `Training` that knows when gradients are there: it starts the parts, waits for them, and does
  what `Training.policy` judges. ``examples/toy_engine.py`` is one, over pipes between processes;
* for ``Compression.topk(...)``, a class with the metaclass `Algorithms`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

from horovod_sparse.collectives import Request, Synchronization
from horovod_sparse.feedback import Recipe
from horovod_sparse.plans import ParameterFacts
from horovod_sparse.topology import Placement, Topology

Result = TypeVar("Result")

#: what a plan looks at, and the parameter, by name
Facts: TypeAlias = Mapping[str, tuple[ParameterFacts, Any]]


@dataclass(frozen=True)
class PartSpec:
    #: stable over ranks and steps
    label: str
    names: tuple[str, ...]
    #: what to do with the parameters
    recipe: Recipe
    #: whether the plan leaves them dense
    dense: bool = False
    number: int | None = None

    @property
    def whole(self) -> bool:
        """True if its accumulator is a `WholeGradient`: it is dense, and its feedback keeps nothing."""
        return self.dense and not self.recipe.feedback.changes_dense

    @property
    def title(self) -> str:
        """Returns the bucket's name for messages; a sum of dense parameters is named by the first of them."""
        others = len(self.names) - 1
        return self.names[0] + (f" and {others} more" if others else "") if self.whole else self.label


@dataclass(eq=False)
class Task:
    """A coroutine that a `Starter` runs; round r communicates as ``name.r``, the same on all ranks."""

    name: str
    done: bool = False
    result: Any = None
    #: what it raised, kept here so that other tasks go on
    error: BaseException | None = None
    #: collectives started so far
    num_rounds: int = 0
    started: float = field(default_factory=time.perf_counter)
    finished: float = float("nan")
    #: time this process sat in `Starter.wait` for this task and had nothing else to do: the part of its
    #: communication that computation did not hide. Tasks waited for together each count the same seconds;
    #: `Starter.idle_seconds` counts them once.
    waited_seconds: float = 0.0

    def value(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.result


class Starter(Protocol):
    """Runs coroutines together with the other ranks."""

    idle_seconds: float

    def start(self, name: str, coroutine: Synchronization[Any]) -> Task:
        """Starts a coroutine under a name that is the same on all ranks; does not wait."""

    def wait(self, tasks: Sequence[Task]) -> None:
        """Waits for tasks; errors of coroutines stay in their tasks."""


class Engine(Protocol):
    """One framework and its collectives, as a training needs them."""

    #: for messages, and for ranks to compare
    name: str

    def rank_and_size(self) -> tuple[int, int]:
        """Returns rank and size among those that synchronize; in elastic training they change."""

    def ranks(self) -> Placement:
        """Returns the same, and the host, for two levels."""

    def start_token(self) -> object:
        """Returns a token, a new one after every start of the collectives: ranks agree anew then."""

    def facts(self, known: Facts) -> Facts:
        """Returns the parameters to synchronize that are not known yet, in the order of the model."""

    def carry_out(self, coroutine: Synchronization[Result], topology: Topology | None) -> Result:
        """Runs a coroutine with all ranks and returns its result; `topology` says who shares a host."""

    def move_to(self, topology: Topology | None) -> None:
        """Adopts a topology after ranks have agreed on one."""

    def declared(self) -> Mapping[str, object]:
        """Returns arguments, beside recipe and settings, whose values have to be equal on all ranks."""

    def to_array(self, array: np.ndarray) -> Any:
        """Copies a sparsifier's array into the kind that checkpoints hold."""


def carry_out(coroutine: Synchronization[Result], execute: Callable[[Request], Any]) -> Result:
    """Runs a coroutine with a function that carries out one request and waits for what comes back."""
    answer: Any = None
    while True:
        try:
            request = coroutine.send(answer)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        try:
            answer = execute(request)
        except BaseException:
            coroutine.close()
            raise
