"""Puts coroutines into a graph: host functions between Horovod's native operations, one per round.

    start ─▶ allgather ─▶ resume ─▶ allreduce ─▶ resume ─▶ ... ─▶ settle

Host functions look everything up when they are called, so nothing of a step is frozen into the graph; no
thread waits for a collective, so backward goes on meanwhile. Horovod matches by name, in whatever order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.tensorflow.collectives import Wire, carry_out, wire_dtype
from horovod_sparse.tensorflow.graph import HOST, HostFunctions
from horovod_sparse.tensorflow.parts import Part, Task, graph_lifetime_token
from horovod_sparse.tensorflow.tensors import numpy_dtype
from horovod_sparse.tensorflow.training import VariablesTraining

#: bytes of gradients in a batch of small parts: folding these takes about as long as calling Python
_BATCH_BYTES = 1 << 20


class Driver:
    """Builds the TensorFlow operations that synchronize gradients, in the graph being traced."""

    def __init__(self, training: VariablesTraining) -> None:
        self._training, self._process_set, self.host = training, training.process_set, HostFunctions()

    def start(self, parts: Sequence[Part], gradients: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        """Builds the operations of all rounds; returns tensors that are ready after the last rounds."""
        tokens = []
        for batch in _join_small_parts(parts):
            given = [gradients[parts.index(part)] for part in batch]
            tokens += self._build_rounds([part.task for part in batch], given)
        return tokens

    def _begin(self, task: Task, arrays: Sequence[np.ndarray]) -> Wire:
        """Begins a part's step on the host: folds the gradients, and returns the first round's message."""
        here = self._training.rank_and_size
        task.legs.clear()
        with task.record_work():
            try:
                self._training.agree()
                coroutine = self._training.part_of(task).begin(arrays)
            except Exception as error:
                return task.fail(error, here)
            return task.start(coroutine, here)

    def _build_rounds(
        self, tasks: Sequence[Task], gradients: Sequence[Sequence[tf.Tensor]]
    ) -> list[tf.Tensor]:
        """Builds rounds as Horovod's operations between host functions; returns tensors ready at the end."""
        kinds, sizes = tasks[0].kinds, [len(tensors) for tensors in gradients]
        inputs = [tensor for tensors in gradients for tensor in tensors]

        def start_tasks(*arrays: np.ndarray) -> list[np.ndarray]:
            ends = itertools.accumulate(sizes)
            own = [arrays[end - size : end] for size, end in zip(sizes, ends, strict=True)]
            wires = [self._begin(task, mine) for task, mine in zip(tasks, own, strict=True)]
            return [graph_lifetime_token(tasks), *outputs_for(wires, 0)]

        def resume_tasks(number: np.ndarray, *outputs: np.ndarray) -> list[np.ndarray]:
            wires = []
            for i, task in enumerate(tasks):
                with task.record_work():
                    wires.append(task.resume(*outputs[2 * i : 2 * i + 2]))
            return outputs_for(wires, int(number) + 1)

        def outputs_for(wires: Sequence[Wire], number: int) -> list[np.ndarray]:
            return [np.zeros((), np.int32)] if number == len(kinds) else list(itertools.chain(*wires))

        def output_types(number: int) -> list[tf.DType]:
            if number == len(kinds):
                return [tf.int32]
            dtypes = [(wire_dtype(kinds[number], task.value_dtype), np.int32) for task in tasks]
            return [tf.as_dtype(dtype) for dtype in itertools.chain(*dtypes)]

        with tf.device(HOST):
            held, *messages = self.host.add_to_graph(start_tasks, inputs, [tf.int32, *output_types(0)])
            for number, kind in enumerate(kinds):
                answers = [tf.constant(number, tf.int32)]
                for i, task in enumerate(tasks):
                    buffer, splits = shaped(messages[2 * i : 2 * i + 2], ([None], [None]))
                    answers += carry_out(kind, buffer, splits, f"{task.name}.{number}", self._process_set)
                messages = self.host.add_to_graph(resume_tasks, answers, output_types(number + 1))
            return [held, *shaped(messages[:1], ([],))]


def shaped(tensors: list[tf.Tensor], shapes: Sequence[Any]) -> list[tf.Tensor]:
    """Sets the static shapes of a host function's results, which TensorFlow cannot infer; returns them."""
    for tensor, shape in zip(tensors, shapes, strict=True):
        tensor.set_shape(shape)
    return tensors


def _join_small_parts(parts: Sequence[Part]) -> list[list[Part]]:
    """Groups parts smaller than `_BATCH_BYTES`, in backward order, so that they share operations."""
    batches: list[list[Part]] = []
    filling: dict[Any, list[Part]] = {}  # by kinds of collectives
    for part in parts:
        if _num_bytes(part) >= _BATCH_BYTES:
            batches.append([part])
            continue
        kinds = part.task.kinds
        if kinds not in filling:
            batches.append(filling.setdefault(kinds, []))
        filling[kinds].append(part)
        if sum(map(_num_bytes, filling[kinds])) >= _BATCH_BYTES:
            del filling[kinds]
    return batches


def _num_bytes(part: Part) -> int:
    return sum(math.prod(shape) for shape in part.shapes) * numpy_dtype(part.dtype).itemsize
