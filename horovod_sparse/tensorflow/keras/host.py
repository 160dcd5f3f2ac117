"""A thread that exchanges, and values of Keras' variables on the host: a pass of own steps runs on both."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from horovod_sparse.arrays import Indices, Values
from horovod_sparse.collectives import Synchronization
from horovod_sparse.errors import DeadlineError, HorovodSparseError
from horovod_sparse.kernels.host import scatter, sparse_vectors
from horovod_sparse.sparsifiers import SparseSum
from horovod_sparse.tensorflow.collectives import carry_out_together
from horovod_sparse.training.engine import Task


class Exchanges:
    """Implements `Starter`: a thread carries coroutines out one after the other, in their order.

    Collectives are Horovod's own; an exchange with a delay travels behind the next pass.
    """

    def __init__(self, process_set: Any, seconds: float | None) -> None:
        self.idle_seconds, self.label = 0.0, ""
        self._process_set, self._seconds = process_set, seconds
        self._graphs: dict[Any, Any] = {}
        self._queue: queue.SimpleQueue[tuple[Task, Synchronization[Any]]] = queue.SimpleQueue()
        self._ended = threading.Condition()
        self._thread: threading.Thread | None = None

    def start(self, name: str, coroutine: Synchronization[Any]) -> Task:
        task = Task(f"{self.label}{name}")
        self._queue.put((task, coroutine))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="horovod_sparse.exchanges", daemon=True)
            self._thread.start()
        return task

    def _work(self) -> None:
        while True:
            task, coroutine = self._queue.get()
            given: Any = {"deadline_seconds": self._seconds, "graphs": self._graphs}
            try:
                task.result = carry_out_together(coroutine, self._process_set, task.name, **given)
            except BaseException as error:
                task.error = error
            with self._ended:
                task.done, task.finished = True, time.perf_counter()
                self._ended.notify_all()

    def wait(self, tasks: Sequence[Task]) -> None:
        """Waits for tasks; raises what no algorithm has raised, as Horovod's failures."""
        for task in tasks:
            began = time.perf_counter()
            with self._ended:
                while not task.done:
                    self._ended.wait()
            waited = time.perf_counter() - began
            task.waited_seconds += waited
            self.idle_seconds += waited
            error = task.error
            if isinstance(error, DeadlineError) or not isinstance(error, HorovodSparseError | None):
                raise error


class HostParameters:
    """Implements `Parameters`: copies of variables' values within a pass, else the variables themselves.

    Args:
        variables: of a bucket, float32 or float64.
        places: [start, stop) of each.
    """

    def __init__(self, variables: Sequence[Any], places: Sequence[tuple[int, int]]) -> None:
        self._variables, self._places = list(variables), list(places)
        self._values: list[np.ndarray] | None = None

    def open(self, values: Sequence[np.ndarray]) -> None:
        """Begins a pass with the variables' values, which are copied."""
        self._values = [np.array(one) for one in values]

    def close(self, *, write: bool = False) -> list[np.ndarray]:
        """Ends a pass; returns the values, and writes them into the variables if asked."""
        values, self._values = self._values or [], None
        for one, value in zip(self._variables, values, strict=False) if write else ():
            one.assign(value)
        return values

    def flats(self) -> list[np.ndarray]:
        """Returns the values now, flat."""
        values = [one.numpy() for one in self._variables] if self._values is None else self._values
        return [one.reshape(-1) for one in values]

    @contextlib.contextmanager
    def _placed(self, factors: Mapping[float, Sequence[int]] | None = None) -> Iterator[list[Any]]:
        """Gives arrays to be changed, where each begins, and its factor."""
        outside = self._values is None
        if outside:
            self.open([one.numpy() for one in self._variables])
        factor_of = {number: factor for factor, numbers in (factors or {}).items() for number in numbers}
        yield [
            (one, start, factor_of.get(number, 1.0))
            for number, (one, (start, _)) in enumerate(zip(self.flats(), self._places, strict=True))
        ]
        if outside:
            self.close(write=True)

    def take(self, indices: Indices) -> list[np.ndarray]:
        cuts = [0, *np.searchsorted(indices, [stop for _, stop in self._places]).tolist()]
        return [
            scatter.taken(one, indices[cuts[number] : cuts[number + 1]] - np.int32(start))
            for number, (one, (start, _)) in enumerate(zip(self.flats(), self._places, strict=True))
        ]

    def put(self, indices: Indices, before: list[np.ndarray]) -> None:
        with self._placed() as placed:
            sparse_vectors.replace(placed, [(indices, before[0])])

    def move(self, indices: Indices, values: Values) -> list[np.ndarray]:
        with self._placed() as placed:
            return sparse_vectors.replace(placed, again=[(indices, values)])[1]

    def replace(
        self,
        undone: Sequence[tuple[Indices, list[np.ndarray]]],
        shrunk: Mapping[float, Sequence[int]],
        total: SparseSum,
        scale: float,
        again: Sequence[tuple[Indices, Values]],
    ) -> tuple[int, list[list[np.ndarray]]]:
        values = total.values if scale == 1.0 else total.values * total.values.dtype.type(scale)
        back = [(indices, before[0]) for indices, before in undone]
        with self._placed(shrunk) as placed:
            if not total.whole:
                num_union, kept = sparse_vectors.replace(placed, back, (total.indices, values), again)
                return num_union, [[one] for one in kept]
            sparse_vectors.replace(placed, back)
            for (one, *_), (start, stop) in zip(placed, self._places, strict=True):
                one -= values[start:stop]
            unmoved = [(one, start, 1.0) for one, start, _ in placed]
            return int(values.size), [sparse_vectors.replace(unmoved, again=[one])[1] for one in again]

    def to_save(self, values: list[np.ndarray]) -> list[np.ndarray]:
        return [one.copy() for one in values]

    def from_saved(self, saved: Sequence[Any]) -> list[np.ndarray]:
        return [np.array(one) for one in saved]
