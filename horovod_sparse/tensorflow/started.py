"""The operations of a synchronization in a graph, but for its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.tensorflow.buckets import Buckets
from horovod_sparse.tensorflow.driver import unroll
from horovod_sparse.tensorflow.looped import looped
from horovod_sparse.tensorflow.parts import Part

__all__ = ["Gradient", "Started", "start"]

#: tf.Tensor, tf.IndexedSlices or None
Gradient = Any


@dataclass(frozen=True, eq=False)
class Started:
    """A synchronization in a graph, but for its end.

    Attributes:
        parts: that take part.
        tokens: of the parts: see `unroll`.
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
) -> Started:
    """Puts everything up to the end of the last round into the graph that is being traced.

    Args:
        buckets: which have these variables.
        gradients: None where there is none, and for a variable with a bucket zeros are sent.
        variables: of the gradients.
        rate: float64 [], NaN where it is not known.
        reduce: gives the sum of a gradient that no bucket takes, and gets its position.
        stamped: gives the gradients of these positions, by name, as they are or with their times taken.
        process_set: the ranks that take part.
        agree: called on the host before every step of a bucket: see `Starts.agree`.
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
    tokens = [
        _unrolled(buckets, part, [given[by_name[name]] for name in part.names], rate, process_set, agree)
        for part in parts
    ]
    return Started(parts, tokens, [by_name[name] for part in parts for name in part.names], others)


def _unrolled(
    buckets: Buckets,
    part: Part,
    given: Sequence[Gradient],
    rate: tf.Tensor,
    process_set: Any,
    agree: Callable[[], None],
) -> tf.Tensor:
    inputs = [
        tf.zeros(shape, part.dtype) if gradient is None else gradient
        for gradient, shape in zip(given, part.shapes, strict=True)
    ]
    # by its position: a graph shall not keep the memory of buckets that there are no more
    version, position = buckets.version, buckets.parts.index(part)

    def begin(rate: np.ndarray, *arrays: np.ndarray) -> Any:
        agree()
        (part,) = buckets.at(version, [position])
        return part.begin(None if np.isnan(rate) else float(rate), arrays)

    put = looped if part.task.looped else unroll
    return put(part.task, begin, buckets.place, [rate, *inputs], process_set)
