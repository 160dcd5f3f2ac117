"""Puts coroutines into a graph: host functions between Horovod's native operations, one per round.

    start ─▶ allgather ─▶ resume ─▶ allreduce ─▶ resume ─▶ ... ─▶ settle

`start` and `resume` are Python functions on NumPy arrays that look everything up when they are called,
so nothing of a step is frozen into the graph; the collectives are asynchronous kernels, so no thread
waits and backward goes on meanwhile. Ranks may run buckets in any order: Horovod matches by name, and
within a bucket data dependencies fix the order.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.collectives import AllToAll, Exchange
from horovod_sparse.tensorflow.collectives import NO_SPLITS, Wire, carry_out, wire_dtype
from horovod_sparse.tensorflow.graph import HOST, HostFunctions
from horovod_sparse.tensorflow.parts import Part
from horovod_sparse.tensorflow.tensors import numpy_dtype
from horovod_sparse.tensorflow.training import VariablesTraining
from horovod_sparse.tensorflow.transport import PairsThread, pairs_thread_for, present_pairs_thread
from horovod_sparse.tensorflow.waiting import Awaited, Waiting, Watch

#: of gradients: what a batch of small parts comes to. Folding so many takes about as long as calling Python.
_BATCH_BYTES = 1 << 20


class Driver:
    """Builds the operations of synchronizations, in the graph that is being traced; runs nothing."""

    def __init__(self, training: VariablesTraining, watch: Watch) -> None:
        self._training, self._process_set, self._watch = training, training.process_set, watch
        #: of what a thread of pairs has; the watch's own is for what Horovod has, in another thread
        self._deadline = watch.another_deadline()
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
        finish: Callable[[], list[np.ndarray]],
        like: Sequence[tuple[tf.DType, Any]],
    ) -> list[tf.Tensor]:
        """What comes of several synchronizations, when all of them have ended.

        An error is raised here, and nowhere else: this rank has nothing under way any more then.
        """

        def call(*_tokens: np.ndarray) -> list[np.ndarray]:
            return finish()

        with tf.device(HOST):
            results = self.host.run(call, list(tokens), [dtype for dtype, _ in like])
        for result, (_, shape) in zip(results, like, strict=True):
            result.set_shape(shape)
        return list(results)

    def _beginning(self, part: Part, thread: PairsThread | None = None) -> Callable[..., Wire]:
        """What begins a part's step on the host: gives what the first collective takes.

        A thread gets the rest of the step, where there is one; `task.wait` ends it then.
        """
        # by its position: a graph shall not keep the memory of buckets that there are no more
        version, position, task = self._training.version, self._training.parts.index(part), part.task

        def begin(rate: np.ndarray, arrays: Sequence[np.ndarray]) -> Wire:
            here = self._training.rank_and_size
            task.legs.clear()
            with task.working() if thread is None else contextlib.nullcontext():
                try:
                    self._training.agree()
                    (part,) = self._training.at(version, [position])
                    known = float(rate[0]) if rate.size else None
                    coroutine = part.begin(known, arrays) if arrays else part.again()
                except Exception as error:
                    return task.fail(error, here)
                if thread is None:
                    return task.start(coroutine, here)
            task.entrust(coroutine, here, present_pairs_thread(self._process_set, thread), self._deadline)
            return NO_SPLITS, NO_SPLITS

        return begin

    def _unrolled(
        self,
        parts: Sequence[Part],
        gradients: Sequence[Sequence[tf.Tensor]],
        rate: tf.Tensor,
        waiting: Waiting,
        batch: int,
    ) -> list[tf.Tensor]:
        """The operations of parts that begin together, and make the same kinds of requests.

        Each has its own collectives, but what the host does between two rounds is one call for all of them:
        calling Python costs as much as a small bucket. Where messages go between pairs of ranks and MPI can
        be used, that is one operation: a thread has the rest.
        """
        tasks, kinds = [part.task for part in parts], parts[0].task.kinds
        sizes = [len(tensors) for tensors in gradients]
        inputs = [rate, *(tensor for tensors in gradients for tensor in tensors)]
        thread: PairsThread | None = None
        if tasks[0].between_pairs:
            thread, transport = pairs_thread_for(self._process_set)
            for task in tasks:
                task.transport = transport
        beginnings = [self._beginning(part, thread) for part in parts]

        def start(rate: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
            own = _apart(arrays, sizes)
            wires = [begin(rate, mine) for begin, mine in zip(beginnings, own, strict=True)]
            return [waiting.begun(batch), *given(wires, 0)]

        def resume(number: np.ndarray, *outputs: np.ndarray) -> list[np.ndarray]:
            waiting.moved()
            wires = []
            for task, own in zip(tasks, _apart(outputs, [width(int(number))] * len(tasks)), strict=True):
                with task.working():
                    wires.append(task.resume(own[0], own[1] if len(own) > 1 else NO_SPLITS))
            return given(wires, int(number) + 1)

        def given(wires: Sequence[Wire], number: int) -> list[np.ndarray]:
            if number == len(kinds) or thread is not None:
                return [np.zeros((), np.int32)]
            return [array for wire in wires for array in wire[: width(number)]]

        def width(number: int) -> int:
            """Arrays of a message: with splits or without."""
            return 2 if kinds[number] in (Exchange, AllToAll) else 1

        def types(number: int) -> list[tf.DType]:
            if number == len(kinds) or thread is not None:
                return [tf.int32]
            return [
                tf.as_dtype(dtype)
                for task in tasks
                for dtype in (wire_dtype(kinds[number], task.value_dtype), np.int32)[: width(number)]
            ]

        with tf.device(HOST):
            held, *messages = self.host.run(start, inputs, [tf.int32, *types(0)])
            for number, kind in enumerate(kinds if thread is None else ()):
                answers = [tf.constant(number, tf.int32)]
                for task, own in zip(tasks, _apart(messages, [width(number)] * len(tasks)), strict=True):
                    for tensor in own:
                        tensor.set_shape([None])
                    splits = own[1] if len(own) > 1 else None
                    answer = carry_out(kind, own[0], splits, f"{task.name}.{number}", self._process_set)
                    answers += answer[: len(own)]
                messages = self.host.run(resume, answers, types(number + 1))
            messages[0].set_shape([])
            return [held, messages[0]]

    def _looped(
        self, part: Part, gradients: Sequence[tf.Tensor], rate: tf.Tensor, waiting: Waiting, batch: int
    ) -> list[tf.Tensor]:
        """The operations of a part, of as many rounds as `task.kinds` has when the graph runs.

        In elastic training a function is traced once, and ranks come and go. Most sparsifiers have the same
        rounds at any number of ranks; those that send between pairs have more of them the more ranks there
        are. So there the host says after every round whether there is another one. All kinds of request are
        one operation then, the all-to-all, to which an allgather gives the same for every rank.
        """
        task, types, begin = part.task, [tf.int32, tf.int32, tf.bool], self._beginning(part)

        def start(rate: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
            wire = begin(rate, arrays)
            return [waiting.begun(batch), *given(wire)]

        def resume(output: np.ndarray, splits: np.ndarray) -> list[np.ndarray]:
            waiting.moved()
            with task.working():
                return given(task.resume(output, splits))

        def given(wire: Wire) -> list[np.ndarray]:
            return [*wire, np.array(task.has_rounds)]

        def shaped(message: list[tf.Tensor]) -> list[tf.Tensor]:
            for tensor, shape in zip(message, ([None], [None], []), strict=True):
                tensor.set_shape(shape)
            return message

        def turn(buffer: tf.Tensor, splits: tf.Tensor, _more: tf.Tensor) -> list[tf.Tensor]:
            with tf.device(HOST):
                name = f"{task.name}.rounds"
                output, received = carry_out(AllToAll, buffer, splits, name, self._process_set)
                return shaped(self.host.run(resume, [output, received], types))

        with tf.device(HOST):
            held, *first = self.host.run(start, [rate, *gradients], [tf.int32, *types])
            message = shaped(first)
            ended = tf.while_loop(lambda _buffer, _splits, more: more, turn, message, parallel_iterations=1)
            return [held, tf.cast(ended[2], tf.int32)]


def _apart(arrays: Sequence[Any], sizes: Sequence[int]) -> list[Sequence[Any]]:
    ends = itertools.accumulate(sizes)
    return [arrays[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _batches(parts: Sequence[Part]) -> list[list[Part]]:
    """Parts in batches that the host serves together: small ones in backward order, until they are large.

    A large one is alone: its collectives are under way as soon as its gradients are there.
    """
    batches: list[list[Part]] = []
    filling: dict[Any, list[Part]] = {}  # by the requests that they make, and what carries them
    for part in parts:
        requests = part.task.looped, part.task.kinds, part.task.dense
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
