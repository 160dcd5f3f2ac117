"""The operations of a synchronization in a graph, but for its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.tensorflow.buckets import Buckets
from horovod_sparse.tensorflow.driver import HostFunctions, Job, unroll
from horovod_sparse.tensorflow.looped import looped
from horovod_sparse.tensorflow.parts import Part
from horovod_sparse.tensorflow.tensors import numpy_dtype

__all__ = ["Gradient", "Started", "start"]

#: tf.Tensor, tf.IndexedSlices or None
Gradient = Any

#: of gradients: what a batch of small parts comes to. Folding so many takes about as long as calling Python.
_BATCH_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class Started:
    """A synchronization in a graph, but for its end.

    Attributes:
        parts: that take part.
        tokens: of their ends: see `unroll`.
        positions: of all parts' variables, one part behind the other, among those given.
        others: the gradients; done, where no part has them.
    """

    parts: list[Part]
    tokens: list[tf.Tensor]
    positions: list[int]
    others: list[Gradient]


def start(
    buckets: Buckets,
    gradients: Sequence[Gradient],
    variables: Sequence[Any],
    rate: tf.Tensor,
    reduce: Callable[[Gradient, int], Gradient],
    stamped: Callable[[Sequence[Gradient], Mapping[str, int]], list[Gradient]],
    process_set: Any,
    agree: Callable[[], None],
    host: HostFunctions,
) -> Started:
    """Puts everything up to the end of the last round into the graph that is being traced.

    Args:
        buckets: which have these variables.
        gradients: None where there is none, and for a variable with a bucket zeros are sent.
        variables: of the gradients.
        rate: see `as_rate`.
        reduce: gives the sum of a gradient that no bucket takes, and gets its position.
        stamped: gives the gradients of these positions, by name, as they are or with their times taken.
        process_set: the ranks that take part.
        agree: called on the host before every step of a bucket: see `Starts.agree`.
        host: keeps the host functions.
    """
    others, by_name = list(gradients), {}
    for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
        name = buckets.name_of(variable)
        if gradient is None or (name is not None and not isinstance(gradient, tf.IndexedSlices)):
            if name is not None:
                by_name[name] = i
            continue
        others[i] = reduce(gradient, i)
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
    return Started(parts, tokens, [by_name[name] for part in parts for name in part.names], others)


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


def _job(buckets: Buckets, part: Part, agree: Callable[[], None]) -> Job:
    # by its position: a graph shall not keep the memory of buckets that there are no more
    version, position = buckets.version, buckets.parts.index(part)

    def begin(rate: np.ndarray, *arrays: np.ndarray) -> Any:
        agree()
        (part,) = buckets.at(version, [position])
        return part.begin(float(rate[0]) if rate.size else None, arrays)

    return Job(part.task, begin)
