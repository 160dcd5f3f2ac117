"""Puts a coroutine into a graph: host functions between Horovod's native operations, one per round.

    start ─▶ allgather ─▶ resume ─▶ allreduce ─▶ resume ─▶ ... ─▶ settle

`start` and `resume` are Python functions on NumPy arrays that look everything up when they are called,
so nothing of a step is frozen into the graph; the collectives are asynchronous kernels, so no thread
waits and backward goes on meanwhile. Ranks may run buckets in any order: Horovod matches by name, and
within a bucket data dependencies fix the order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.collectives import AllToAll, Exchange
from horovod_sparse.tensorflow.collectives import NO_SPLITS, Wire, carry_out, wire_dtype
from horovod_sparse.tensorflow.graph import HOST, HostFunctions
from horovod_sparse.tensorflow.looped import looped
from horovod_sparse.tensorflow.parts import Part
from horovod_sparse.tensorflow.task import Job
from horovod_sparse.tensorflow.tensors import numpy_dtype
from horovod_sparse.tensorflow.transport import Courier, between_pairs, courier_for
from horovod_sparse.tensorflow.variable_buckets import VariableBuckets


def unroll(
    jobs: Sequence[Job],
    gradients: Sequence[Sequence[tf.Tensor]],
    rate: tf.Tensor,
    place: Callable[[], tuple[int, int]],
    process_set: Any,
    host: HostFunctions,
) -> tf.Tensor:
    """The operations of synchronizations that begin together. Builds them; runs nothing.

    Each has its own collectives, but what the host does between two rounds is one call for all of them:
    calling Python costs as much as a small bucket.

    Where messages go between pairs of ranks and MPI can be used, that is one operation: a courier has the
    rest, and `task.wait` ends it.

    Args:
        jobs: of the same kinds of requests.
        gradients: of each of them.
        rate: of this step: see `as_rate`.
        place: tells (rank, size) within the process set, when the graph runs.
        process_set: who takes part.
        host: keeps the host functions.

    Returns:
        int32 [], ready when the coroutines have ended, well or not, or are under way with the courier; for
        `settle`.
    """
    tasks, kinds = [job.task for job in jobs], jobs[0].task.kinds
    sizes = [len(tensors) for tensors in gradients]

    def apart(arrays: Sequence[Any], sizes: Sequence[int]) -> list[Sequence[Any]]:
        ends = list(itertools.accumulate(sizes))
        return [arrays[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    inputs = [rate, *(tensor for tensors in gradients for tensor in tensors)]
    courier: Courier | None = None
    if between_pairs(kinds):
        courier, transport = courier_for(process_set)
        for task in tasks:
            task.transport = transport

    def entrust(rate: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
        assert courier is not None
        here = place()
        for job, own in zip(jobs, apart(arrays, sizes), strict=True):
            job.entrust(rate, own, here, courier)
        return [np.zeros((), np.int32)]

    def start(rate: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
        own, here = apart(arrays, sizes), place()
        return given([job.begin(rate, mine, here) for job, mine in zip(jobs, own, strict=True)], 0)

    def resume(number: np.ndarray, *outputs: np.ndarray) -> list[np.ndarray]:
        wires = []
        for task, own in zip(tasks, apart(outputs, [1 + has_splits(int(number))] * len(tasks)), strict=True):
            with task.working():
                wires.append(task.resume(own[0], own[1] if len(own) > 1 else NO_SPLITS))
        return given(wires, int(number) + 1)

    def given(wires: Sequence[Wire], number: int) -> list[np.ndarray]:
        if number == len(kinds):
            return [np.zeros((), np.int32)]
        return [array for wire in wires for array in wire[: 1 + has_splits(number)]]

    def has_splits(number: int) -> bool:
        return kinds[number] in (Exchange, AllToAll)

    def types(number: int) -> list[tf.DType]:
        if number == len(kinds):
            return [tf.int32]
        return [
            tf.as_dtype(dtype)
            for task in tasks
            for dtype in (wire_dtype(kinds[number], task.value_dtype), np.int32)[: 1 + has_splits(number)]
        ]

    with tf.device(HOST):
        if courier is not None:
            messages = host.run(entrust, inputs, [tf.int32])
        else:
            messages = host.run(start, inputs, types(0))
            for number, kind in enumerate(kinds):
                answers = [tf.constant(number, tf.int32)]
                for task, own in zip(
                    tasks, apart(messages, [1 + has_splits(number)] * len(tasks)), strict=True
                ):
                    for tensor in own:
                        tensor.set_shape([None])
                    splits = own[1] if len(own) > 1 else None
                    answer = carry_out(kind, own[0], splits, f"{task.name}.{number}", process_set)
                    answers += answer[: len(own)]
                messages = host.run(resume, answers, types(number + 1))
        messages[0].set_shape([])
        return messages[0]


def settle(
    tokens: Sequence[tf.Tensor],
    finish: Callable[[], list[np.ndarray]],
    like: Sequence[tuple[tf.DType, Any]],
    host: HostFunctions,
) -> list[tf.Tensor]:
    """What comes of several synchronizations, when all of them have ended.

    An error is raised here, and nowhere else: this rank has nothing under way any more then.

    Args:
        tokens: of `unroll`.
        finish: gives the results, or raises. Arrays aligned to 64 bytes are not copied.
        like: dtype and shape of every result.
        host: keeps the host functions.
    """

    def call(*_tokens: np.ndarray) -> list[np.ndarray]:
        return finish()

    with tf.device(HOST):
        results = host.run(call, list(tokens), [dtype for dtype, _ in like])
    for result, (_, shape) in zip(results, like, strict=True):
        result.set_shape(shape)
    return list(results)


#: tf.Tensor, tf.IndexedSlices or None
Gradient = Any

#: of gradients: what a batch of small parts comes to. Folding so many takes about as long as calling Python.
_BATCH_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class Unsettled:
    """A synchronization in a graph up to its end, which `settle` makes.

    Attributes:
        parts: that take part.
        tokens: of their ends: see `unroll`.
        positions: of all parts' variables, one part behind the other, among those given.
        results: the gradients; where no part has them, their sums.
    """

    parts: list[Part]
    tokens: list[tf.Tensor]
    positions: list[int]
    results: list[Gradient]


def start(
    buckets: VariableBuckets,
    gradients: Sequence[Gradient],
    variables: Sequence[Any],
    rate: tf.Tensor,
    reduce: Callable[[Gradient, int], Gradient],
    stamped: Callable[[Sequence[Gradient], Mapping[str, int]], list[Gradient]],
    process_set: Any,
    agree: Callable[[], None],
    host: HostFunctions,
) -> Unsettled:
    """Puts everything up to the end of the last round into the graph that is being traced.

    Args:
        buckets: which have these variables.
        gradients: None where there is none, and for a variable with a bucket zeros are sent.
        variables: of the gradients.
        rate: see `as_rate`.
        reduce: gives the sum of a gradient that no bucket takes, and gets its position.
        stamped: gives the gradients of these positions, by name, as they are or with their times taken.
        process_set: the ranks that take part.
        agree: called on the host before every step of a bucket: see `GradientSynchronizer`.
        host: keeps the host functions.
    """
    results, by_name = list(gradients), {}
    for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
        name = buckets.name_of(variable)
        if gradient is None or (name is not None and not isinstance(gradient, tf.IndexedSlices)):
            if name is not None:
                by_name[name] = i
            continue
        results[i] = reduce(gradient, i)
    parts, given = buckets.of(by_name), stamped(gradients, by_name)
    tokens = []
    for batch in _together(parts):
        jobs = [_job(buckets, part, agree) for part in batch]
        tensors = [_tensors(part, [given[by_name[name]] for name in part.names]) for part in batch]
        common = rate, buckets.place, process_set, host
        if batch[0].task.looped:
            tokens += [looped(job, own, *common) for job, own in zip(jobs, tensors, strict=True)]
        else:
            tokens.append(unroll(jobs, tensors, *common))
    return Unsettled(parts, tokens, [by_name[name] for part in parts for name in part.names], results)


def _together(parts: Sequence[Part]) -> list[list[Part]]:
    """Parts in batches that the host serves together: small ones in backward order, until they are large.

    A large one is alone: its collectives are under way as soon as its gradients are there.
    """
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


def _tensors(part: Part, given: Sequence[Gradient]) -> list[tf.Tensor]:
    return [
        tf.zeros(shape, part.dtype) if gradient is None else gradient
        for gradient, shape in zip(given, part.shapes, strict=True)
    ]


def _job(buckets: VariableBuckets, part: Part, agree: Callable[[], None]) -> Job:
    # by its position: a graph shall not keep the memory of buckets that there are no more
    version, position = buckets.version, buckets.parts.index(part)

    def begin(rate: np.ndarray, *arrays: np.ndarray) -> Any:
        agree()
        (part,) = buckets.at(version, [position])
        return part.begin(float(rate[0]) if rate.size else None, arrays)

    return Job(part.task, begin)
