"""Puts coroutines into a graph: host functions between Horovod's native operations, one per round.

    start ─▶ allgather ─▶ resume ─▶ allreduce ─▶ resume ─▶ ... ─▶ settle

Host functions look everything up when they are called, so nothing of a step is frozen into the graph; no
thread waits for a collective, so backward goes on meanwhile. Horovod matches by name, in whatever order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.collectives import AllToAll
from horovod_sparse.tensorflow.collectives import Wire, carry_out, wire_dtype
from horovod_sparse.tensorflow.graph import HOST, HostFunctions
from horovod_sparse.tensorflow.parts import Part
from horovod_sparse.tensorflow.tensors import numpy_dtype
from horovod_sparse.tensorflow.training import VariablesTraining
from horovod_sparse.tensorflow.waiting import Awaited, Waiting, Watch

#: of gradients: what a batch of small parts comes to. Folding so many takes about as long as calling Python.
_BATCH_BYTES = 1 << 20


class Driver:
    """Builds the operations of synchronizations, in the graph that is being traced; runs nothing."""

    def __init__(self, training: VariablesTraining, watch: Watch) -> None:
        self._training, self._process_set, self._watch = training, training.process_set, watch
        self.host = HostFunctions()

    def start(
        self, parts: Sequence[Part], gradients: Sequence[Sequence[tf.Tensor]], rate: tf.Tensor
    ) -> list[tf.Tensor]:
        """Everything up to the end of the last round."""
        batches = [
            own
            for batch in _batches(parts)
            for own in ([[part] for part in batch] if batch[0].task.looped else [batch])
        ]
        waiting = self._watch.waiting(len(batches), self._awaited(parts))
        tokens = []
        for number, batch in enumerate(batches):
            given = [gradients[parts.index(part)] for part in batch]
            if batch[0].task.looped:
                tokens += self._looped(batch[0], given[0], rate, waiting, number)
            else:
                tokens += self._unrolled(batch, given, rate, waiting, number)
        return tokens

    def _awaited(self, parts: Sequence[Part]) -> Callable[[], Awaited | None]:
        """Tells what comes first among what the others have not sent."""
        label = self._training.engine.label
        tasks = [(f"{label}.{part.name}", part.task) for part in parts]

        def awaited() -> Awaited | None:
            found = ((name, task.awaited) for name, task in tasks)
            return next(((name, number) for name, number in found if number is not None), None)

        return awaited

    def settle(
        self,
        tokens: Sequence[tf.Tensor],
        finish: Callable[..., list[np.ndarray]],
        like: Sequence[tuple[tf.DType, Any]],
    ) -> list[tf.Tensor]:
        """Returns the results of several synchronizations at their end, or raises their errors."""
        with tf.device(HOST):
            results = self.host.run(finish, list(tokens), [dtype for dtype, _ in like])
        return _shaped(results, [shape for _, shape in like])

    def _beginning(self, part: Part) -> Callable[..., Wire]:
        """Returns the host function that begins a part's step."""
        # by its position: a graph shall not keep the memory of buckets that there are no more
        version, position, task = self._training.version, self._training.parts.index(part), part.task

        def begin(rate: np.ndarray, arrays: Sequence[np.ndarray]) -> Wire:
            here = self._training.rank_and_size
            task.legs.clear()
            with task.working():
                try:
                    self._training.agree()
                    (part,) = self._training.at(version, [position])
                    known = float(rate[0]) if rate.size else None
                    coroutine = part.begin(known, arrays)
                except Exception as error:
                    return task.fail(error, here)
                return task.start(coroutine, here)

        return begin

    def _unrolled(
        self,
        parts: Sequence[Part],
        gradients: Sequence[Sequence[tf.Tensor]],
        rate: tf.Tensor,
        waiting: Waiting,
        batch: int,
    ) -> list[tf.Tensor]:
        """Makes the operations of parts with the same kinds of requests: one host call between two rounds."""
        tasks, kinds = [part.task for part in parts], parts[0].task.kinds
        sizes = [len(tensors) for tensors in gradients]
        inputs = [rate, *(tensor for tensors in gradients for tensor in tensors)]
        beginnings = [self._beginning(part) for part in parts]

        def start(rate: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
            ends = itertools.accumulate(sizes)
            own = [arrays[end - size : end] for size, end in zip(sizes, ends, strict=True)]
            wires = [begin(rate, mine) for begin, mine in zip(beginnings, own, strict=True)]
            return [waiting.begun(batch), *given(wires, 0)]

        def resume(number: np.ndarray, *outputs: np.ndarray) -> list[np.ndarray]:
            waiting.moved()
            wires = []
            for i, task in enumerate(tasks):
                with task.working():
                    wires.append(task.resume(*outputs[2 * i : 2 * i + 2]))
            return given(wires, int(number) + 1)

        def given(wires: Sequence[Wire], number: int) -> list[np.ndarray]:
            return [np.zeros((), np.int32)] if number == len(kinds) else list(itertools.chain(*wires))

        def types(number: int) -> list[tf.DType]:
            if number == len(kinds):
                return [tf.int32]
            dtypes = [(wire_dtype(kinds[number], task.value_dtype), np.int32) for task in tasks]
            return [tf.as_dtype(dtype) for dtype in itertools.chain(*dtypes)]

        with tf.device(HOST):
            held, *messages = self.host.run(start, inputs, [tf.int32, *types(0)])
            for number, kind in enumerate(kinds):
                answers = [tf.constant(number, tf.int32)]
                for i, task in enumerate(tasks):
                    buffer, splits = _shaped(messages[2 * i : 2 * i + 2], ([None], [None]))
                    answers += carry_out(kind, buffer, splits, f"{task.name}.{number}", self._process_set)
                messages = self.host.run(resume, answers, types(number + 1))
            return [held, *_shaped(messages[:1], ([],))]

    def _looped(
        self, part: Part, gradients: Sequence[tf.Tensor], rate: tf.Tensor, waiting: Waiting, batch: int
    ) -> list[tf.Tensor]:
        """Makes the operations of a part, of as many rounds as `task.kinds` has when the graph runs.

        In elastic training a function is traced once, and ranks come and go: the host says after every round
        whether there is another one. All requests are all-to-alls then.
        """
        task, begin = part.task, self._beginning(part)
        types = [tf.int32, tf.int32, tf.bool]
        shapes: list[Any] = [[None], [None], []]

        def start(rate: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
            wire = begin(rate, arrays)
            return [waiting.begun(batch), *given(wire)]

        def resume(output: np.ndarray, splits: np.ndarray) -> list[np.ndarray]:
            waiting.moved()
            with task.working():
                return given(task.resume(output, splits))

        def given(wire: Wire) -> list[np.ndarray]:
            return [*wire, np.array(task.has_rounds)]

        def turn(buffer: tf.Tensor, splits: tf.Tensor, _more: tf.Tensor) -> list[tf.Tensor]:
            with tf.device(HOST):
                name = f"{task.name}.rounds"
                output, received = carry_out(AllToAll, buffer, splits, name, self._process_set)
                return _shaped(self.host.run(resume, [output, received], types), shapes)

        with tf.device(HOST):
            held, *first = self.host.run(start, [rate, *gradients], [tf.int32, *types])
            message = _shaped(first, shapes)
            ended = tf.while_loop(lambda _buffer, _splits, more: more, turn, message, parallel_iterations=1)
            return [held, tf.cast(ended[2], tf.int32)]


def _shaped(tensors: list[tf.Tensor], shapes: Sequence[Any]) -> list[tf.Tensor]:
    """Gives results of a host function their shapes, of which a graph knows nothing."""
    for tensor, shape in zip(tensors, shapes, strict=True):
        tensor.set_shape(shape)
    return tensors


def _batches(parts: Sequence[Part]) -> list[list[Part]]:
    """Small parts in backward order, until they are large; a large one is alone, and begins at once."""
    batches: list[list[Part]] = []
    filling: dict[Any, list[Part]] = {}  # by the requests that they make
    for part in parts:
        requests = part.task.looped, part.task.kinds
        batch = filling.get(requests) if _num_bytes(part) < _BATCH_BYTES else None
        if batch is None:
            batches.append(batch := [])
        batch.append(part)
        if _num_bytes(part) < _BATCH_BYTES:
            filling[requests] = batch
            if sum(map(_num_bytes, batch)) >= _BATCH_BYTES:
                del filling[requests]
    return batches


def _num_bytes(part: Part) -> int:
    return sum(math.prod(shape) for shape in part.shapes) * numpy_dtype(part.dtype).itemsize
