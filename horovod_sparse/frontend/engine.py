"""What a front end gives to the code that all front ends share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from horovod_sparse.collectives import Request, Synchronization
from horovod_sparse.feedback import Bucket, Recipe
from horovod_sparse.frontend.parts import Part
from horovod_sparse.merging import Plan
from horovod_sparse.topology import Topology

Result = TypeVar("Result")


class SparsePart(Part, Protocol):
    """A part that is sparsified.

    Attributes:
        bucket: residual, sparsifier and its state.
    """

    bucket: Bucket


class Engine(Protocol):
    """What synchronizes one training's gradients, as shared code sees it.

    A new engine, for another framework or for other collectives than Horovod's, gives:

    * this protocol, and parts that `Part` describes: they alone know where arrays are. So its states are
      saved, loaded and redistributed (`horovod_sparse.frontend.state`), and residuals survive other buckets
      (`held_residuals`, `assign_residuals`);
    * a function that executes one request together with the other ranks, and waits: at least an allgather of
      words and an allreduce of numbers (`horovod_sparse.collectives` says what each gives back). `carry_out`
      then runs all that ranks agree upon (`compared` and `agreed_start` after every start and load,
      `decide`), all that they tell each other (`raise_together`, `shared_lines`), and `calibration`;
    * a token that every start of its collectives changes, to know when `agreed_start` is due;
    * `ParameterFacts` of its parameters, for `first_plan`; and stamps of backward for a `BackwardRecorder`,
      where plans by times are wanted;
    * a class `Compression` with the metaclass `Algorithms`.

    Attributes:
        recipe: what to do with a bucket.
        step: synchronizations done, those that were given up not counted.
        place: rank and size of this process among those that synchronize.
        plan: which parameters form which bucket.
        parts: buckets and dense parameters.
        sparse: the parts that are sparsified, in the plan's order.
        topology: which ranks share a host, where gradients are summed within hosts first; or None.
    """

    recipe: Recipe
    step: int

    @property
    def topology(self) -> Topology | None:
        """See the attributes."""

    @property
    def place(self) -> tuple[int, int]:
        """See the attributes."""

    @property
    def plan(self) -> Plan:
        """See the attributes."""

    @property
    def parts(self) -> Sequence[Part]:
        """See the attributes."""

    @property
    def sparse(self) -> Sequence[SparsePart]:
        """See the attributes."""


def carry_out(coroutine: Synchronization[Result], execute: Callable[[Request], Any]) -> Result:
    """Runs a coroutine with a function that carries out one request and waits for what comes back.

    Args:
        coroutine: yields requests.
        execute: gives the answer to a request.

    Returns:
        What the coroutine returns.

    Example:
        >>> import numpy as np
        >>> from horovod_sparse.collectives import AllReduce
        >>> def double():
        ...     total = yield AllReduce(np.ones(1))
        ...     return float(total[0])
        >>> carry_out(double(), lambda request: 2.0 * request.buffer)
        2.0
    """
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
