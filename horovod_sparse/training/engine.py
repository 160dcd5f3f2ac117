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

#: by name: the facts that plans use, and the parameter
Facts: TypeAlias = Mapping[str, tuple[ParameterFacts, Any]]


@dataclass(frozen=True)
class PartSpec:
    #: of the bucket; equal on all ranks and in all steps
    label: str
    names: tuple[str, ...]
    #: sparsifier and feedback of this part
    recipe: Recipe
    #: True if the plan leaves the parameters dense
    dense: bool = False
    number: int | None = None

    @property
    def whole(self) -> bool:
        """True if the part is dense, and its feedback keeps no residual."""
        return self.dense and not self.recipe.feedback.changes_dense

    @property
    def title(self) -> str:
        """The part's name in error messages; a group of dense parameters has its first one's name."""
        others = len(self.names) - 1
        return self.names[0] + (f" and {others} more" if others else "") if self.whole else self.label


@dataclass(eq=False)
class Task:
    """A coroutine in progress; its round r communicates under the name ``name.r`` on all ranks."""

    name: str
    done: bool = False
    result: Any = None
    #: the coroutine's error, stored so that other tasks continue
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
    """Runs coroutines whose collectives all ranks take part in."""

    idle_seconds: float

    def start(self, name: str, coroutine: Synchronization[Any]) -> Task:
        """Starts a coroutine and returns at once; `name` is equal on all ranks."""

    def wait(self, tasks: Sequence[Task]) -> None:
        """Waits for tasks; an error of a coroutine stays in its task."""


class Engine(Protocol):
    """The interface of a framework and its collectives that a training calls."""

    #: name of the front end, in messages and in what ranks compare
    name: str

    def rank_and_size(self) -> tuple[int, int]:
        """Returns this rank and the number of ranks that synchronize, which elastic training may change."""

    def placement(self) -> Placement:
        """Returns this rank's numbers in the world, in its group and on its host, and its host's name."""

    def start_token(self) -> object:
        """Returns an object that changes when the collectives start again, after which ranks agree anew."""

    def facts(self, known: Facts) -> Facts:
        """Returns the parameters to synchronize that are not in `known`, in the order of the model."""

    def carry_out(self, coroutine: Synchronization[Result], topology: Topology | None) -> Result:
        """Runs a coroutine on all ranks, and returns its result; `topology` says which ranks share a host."""

    def move_to(self, topology: Topology | None) -> None:
        """Called with the topology on which all ranks have agreed."""

    def declared(self) -> Mapping[str, object]:
        """Returns further arguments that have to be equal on all ranks, beside recipe and settings."""

    def to_array(self, array: np.ndarray) -> Any:
        """Copies an array of a sparsifier's state to the type of array that checkpoints contain."""


def carry_out(coroutine: Synchronization[Result], execute: Callable[[Request], Any]) -> Result:
    """Runs a coroutine, carrying out each request by `execute`, which waits for the result."""
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
