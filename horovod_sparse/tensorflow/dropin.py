"""A sparsifier within stock Horovod's tapes and optimizers, which only know `compress` and `decompress`.

Horovod calls both once, when it traces, around an allreduce of its own, and tells them neither the
variable nor the operation. `compress` puts all of a gradient's rounds into the graph, and gives Horovod
one number, 1, to allreduce; what becomes of it, divided by the number of ranks, is the scale of the sum:
so Average, Sum and gradient_predivide_factor act as on a dense gradient. `decompress` waits until all
gradients of the step have come through their last round: an error is raised when this rank has nothing
under way any more, and then no gradient is given to the optimizer.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.errors import ArgumentError, NonFiniteGradientError, UnsupportedError
from horovod_sparse.feedback import Recipe
from horovod_sparse.telemetry import BucketReport, StepReport, Telemetry
from horovod_sparse.tensorflow.driver import HOST, refuse_xla, unroll
from horovod_sparse.tensorflow.gate import Gate
from horovod_sparse.tensorflow.parts import SparseBucket
from horovod_sparse.tensorflow.stock import StockCall, stock_call
from horovod_sparse.tensorflow.task import idle_seconds
from horovod_sparse.tensorflow.tensors import dtype_name

__all__ = ["DropIn", "Pending"]


@dataclass(eq=False)
class _Gathering:
    """The gradients that are synchronized together: those of one call of Horovod's, in one trace.

    Attributes:
        frame: of that call, while it lasts.
        gate: holds gradients back until all have arrived.
        parts: by position.
        arrived: positions whose coroutines have ended in this step.
        left: positions whose sums are still to be applied.
        error: of this step.
        reports: of this step.
        waited: seconds of waiting in this step.
    """

    frame: Any
    gate: Gate
    parts: dict[int, SparseBucket] = field(default_factory=dict)
    arrived: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    error: BaseException | None = None
    reports: list[BucketReport] = field(default_factory=list)
    waited: float = 0.0


@dataclass(frozen=True, eq=False)
class Pending:
    """A gradient between `compress` and `decompress`, in the graph."""

    gathering: _Gathering
    position: int
    token: tf.Tensor


class DropIn:
    """What a `SparseCompressor` does in stock Horovod's tapes and optimizers.

    Density applies to every gradient for itself. Gradients without elements or of an integer type stay
    dense. The learning rate is not known here, so error feedback does not follow its changes.

    Args:
        recipe: what to do with a gradient.
        process_set: of the compressor, or None.
        name: of its collectives.
    """

    def __init__(self, recipe: Recipe, process_set: Any, name: str) -> None:
        self.recipe, self.process_set, self.name = recipe, process_set, name
        self.telemetry = Telemetry()
        self._parts: dict[int, SparseBucket] = {}
        self._variables: dict[int, Any] = {}
        self._gathering: _Gathering | None = None
        self._num_gatherings = 0
        self._lock = threading.Lock()

    def compress(self, tensor: tf.Tensor) -> tuple[tf.Tensor, Pending | None]:
        """Puts a gradient's rounds into the graph.

        Returns:
            One float64 for Horovod to allreduce, and what `decompress` needs. A gradient that stays
            dense comes back as it is, with None.

        Raises:
            UnsupportedError: for Adasum, within XLA, where something else than Horovod's tapes and
                optimizers calls, and for a second tape or optimizer.
        """
        refuse_xla()
        call = stock_call(tensor)
        dtype = dtype_name(tensor.dtype)
        if dtype is None or tensor.shape.num_elements() == 0:
            return tensor, None
        process_set = self._agreed(call.process_set)
        gathering = self._gathering_of(call)
        part = self._part(call, tensor, dtype, process_set)
        position = call.position
        gathering.parts[position] = part

        def begin(array: np.ndarray) -> Any:
            with self._lock:
                self._tidy(gathering)
                gathering.arrived.discard(position)
            return part.begin(None, [array])

        token = unroll(part.task, begin, lambda: _place(process_set), [tensor], process_set)
        return tf.ones([1], tf.float64), Pending(gathering, position, token)

    def decompress(self, tensor: tf.Tensor, pending: Pending) -> tf.Tensor:
        """The synchronized gradient, when those of all variables have ended well.

        Args:
            tensor: what Horovod has made of what `compress` gave it.
            pending: from `compress`.
        """
        gathering, position = pending.gathering, pending.position
        part = gathering.parts[position]

        def arrive(_token: np.ndarray, _factor: np.ndarray) -> np.ndarray:
            return np.zeros(self._arrive(gathering, position), np.int32)

        def finish(_released: np.ndarray, factor: np.ndarray) -> np.ndarray:
            return self._finish(gathering, position, float(factor[0]))

        with tf.device(HOST):
            released = tf.numpy_function(arrive, [pending.token, tensor], tf.int32)
            released.set_shape([None])
            ticket = gathering.gate.pass_through(released)
            result = tf.numpy_function(finish, [ticket, tensor], tf.as_dtype(part.dtype))
        result.set_shape(part.shapes[0])
        return result

    def _agreed(self, theirs: Any) -> Any:
        if self.process_set is not None and theirs is not self.process_set:
            raise ArgumentError(
                "process_set", self.process_set, f"the same as to the tape or optimizer, {theirs}, or none"
            )
        return theirs

    def _gathering_of(self, call: StockCall) -> _Gathering:
        if self._gathering is None or self._gathering.frame is not call.frame:
            gate = Gate(f"{self.name}.gate{self._num_gatherings}")
            self._num_gatherings += 1
            self._gathering = _Gathering(call.frame, gate)
        return self._gathering

    def _part(self, call: StockCall, tensor: tf.Tensor, dtype: str, process_set: Any) -> SparseBucket:
        position, shape = call.position, tuple(tensor.shape)
        part = self._parts.get(position)
        if part is None:
            part = self._parts[position] = SparseBucket(
                f"gradient{position}",
                f"{self.name}.{position}",
                [call.name],
                [shape],
                dtype,
                self.recipe,
                lambda: _place(process_set),
            )
        known = self._variables.setdefault(position, call.variable)
        differs = known is not None and call.variable is not None and known is not call.variable
        if differs or part.shapes != [shape] or part.dtype != dtype:
            raise UnsupportedError(
                f"gradient {position} was {part.names[0]}, {part.dtype} {part.shapes[0]}, and now it is "
                f"{call.name}, {dtype} {shape}: give every tape or optimizer a compressor of its own"
            )
        return part

    def _tidy(self, gathering: _Gathering) -> None:
        """Before a step: forgets what a step that was given up has left in the gate."""
        if gathering.error is not None:
            gathering.error = None
            gathering.arrived.clear()
            gathering.left.clear()
            gathering.gate.empty()

    def _arrive(self, gathering: _Gathering, position: int) -> int:
        """How many gradients may go on: all of them, with the last one."""
        with self._lock:
            gathering.arrived.add(position)
            if len(gathering.arrived) < len(gathering.parts):
                return 0
            gathering.arrived.clear()
            parts = list(gathering.parts.values())
            gathering.waited = idle_seconds([part.task for part in parts], time.perf_counter())
            gathering.reports.clear()
            gathering.left = set(gathering.parts)
            errors = [part.task.error for part in parts if part.task.error is not None]
            if errors:
                for part in parts:
                    part.abandon()
                gathering.error = min(errors, key=lambda error: isinstance(error, NonFiniteGradientError))
            return len(parts)

    def _finish(self, gathering: _Gathering, position: int, factor: float) -> np.ndarray:
        if gathering.error is not None:
            raise gathering.error
        part = gathering.parts[position]
        arrays, report = part.apply(factor / part.bucket.info.size)
        with self._lock:
            gathering.reports.append(report)
            gathering.left.discard(position)
            if not gathering.left:
                step = int(self.telemetry.last.step + 1) if self.telemetry.last else 1
                self.telemetry.add(StepReport.of(step, gathering.reports, gathering.waited))
        return arrays[0]


def _place(process_set: Any) -> tuple[int, int]:
    return int(process_set.rank()), int(process_set.size())
