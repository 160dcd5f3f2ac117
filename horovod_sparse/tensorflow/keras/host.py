"""Copies of Keras' variables on the host, and the thread that exchanges own steps."""

from __future__ import annotations

import os
import queue
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.carriers import side_by_side
from horovod_sparse.errors import DeadlineError, HorovodSparseError
from horovod_sparse.kernels.host.scatter import native_bits
from horovod_sparse.tensorflow.collectives import carry_out_together
from horovod_sparse.tensorflow.tensors import ReusedArrays, as_variable, unique_names
from horovod_sparse.tensorflow.waiting import Watch
from horovod_sparse.training.engine import Batch, Starter, Task
from horovod_sparse.training.parts import Parameters


class Exchanges(Starter):
    """Runs exchanges in a thread, one after another in the order of their starts.

    Collectives are Horovod's own; with a delay an exchange runs beside the next pass.
    """

    def __init__(self, process_set: Any, seconds: float | None) -> None:
        self.label, self._ended = "", threading.Condition()
        self._given = {"process_set": process_set, "watch": Watch(seconds, process_set)}
        self._graphs: dict[Any, Any] = {}
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._has_thread = False

    def _begin(self, batch: Batch) -> None:
        carry = partial(_run_batch, batch, self._ended, name=self.label + batch[0][0].name, **self._given)
        if (tf.config.threading.get_inter_op_parallelism_threads() or len(os.sched_getaffinity(0))) == 1:
            carry()  # a graph would find no thread beside the host function that waits for it
            return
        self._queue.put(partial(carry, graphs=self._graphs))
        if not self._has_thread:
            self._has_thread = True
            # the thread holds the queue alone, and ends with this object
            given = (self._queue,)
            threading.Thread(target=_worker, args=given, name="horovod_sparse.exchanges", daemon=True).start()
            weakref.finalize(self, self._queue.put, None)

    def wait(self, tasks: Sequence[Task]) -> None:
        """Waits for tasks; raises Horovod's and deadline errors, other errors stay in `task.error`."""
        began = time.perf_counter()
        with self._ended:
            self._ended.wait_for(lambda: all(task.done for task in tasks))
        waited = time.perf_counter() - began
        self.idle_seconds += waited
        for task in tasks:
            task.waited_seconds, error = waited, task.error
            if isinstance(error, DeadlineError) or not isinstance(error, HorovodSparseError | None):
                raise error


def _worker(waiting: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (carry := waiting.get()) is not None:
        carry()
        del carry


def _run_batch(batch: Batch, ended: threading.Condition, **given: Any) -> None:
    """Runs tasks side by side, and ends them; the first one gets their failure."""
    try:
        carry_out_together(side_by_side(batch, given["process_set"].size()), **given)
    except BaseException as error:
        batch[0][0].error = error
    with ended:
        for task, _ in batch:
            task.done = True
        ended.notify_all()


class HostVariables(Parameters):
    """Holds copies of variables' values during a pass; outside of a pass reads the variables."""

    def __init__(self, variables: Sequence[Any], spans: Sequence[tuple[int, int]]) -> None:
        super().__init__(spans)
        self._variables, dtype = list(variables), np.dtype(variables[0].dtype.as_numpy_dtype)
        self._copies = ReusedArrays([tuple(one.shape) for one in variables], dtype)
        self._values: list[np.ndarray] = []
        self._is_open = False

    def open(self, values: Sequence[np.ndarray]) -> None:
        """Begins a pass: copies the given values of the variables."""
        self._values, self._is_open = self._copies.acquire(), True
        for copy, value in zip(self._values, values, strict=True):
            copy[...] = value

    def close(self, *, write: bool = False) -> list[np.ndarray]:
        """Ends a pass: returns the changed values; `write` also assigns them to the variables."""
        values, was_open, self._is_open = self._values, self._is_open, False
        if write and was_open:
            self.after_write()
        self._values = []
        return values

    def arrays(self) -> list[np.ndarray]:
        if not self._is_open:
            self._values = [np.array(one.numpy()) for one in self._variables]
        return [native_bits(one) for one in self._values]

    def after_write(self) -> None:
        for one, value in zip(self._variables, self._values, strict=True) if not self._is_open else ():
            one.assign(value)


def variables_by_name(variables: Sequence[Any]) -> dict[str, Any]:
    """Returns variables by unique names, without Keras' numbers, which differ between processes."""
    paths = [re.sub(r"_\d+", "", str(getattr(one, "path", None) or one.name)) for one in variables]
    names = unique_names([SimpleNamespace(name=path) for path in paths])
    return {name: as_variable(one) for name, one in zip(names, variables, strict=True)}
