"""Rounds in a loop, for graphs that outlive the number of ranks for which they were traced.

In elastic training a function is traced once, and ranks come and go. Most sparsifiers have the same rounds
at any number of ranks; those that send between pairs have more of them the more ranks there are. So there
the host says after every round whether there is another one. All kinds of request are one operation then,
the all-to-all, to which an allgather gives the same for every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.collectives import AllGather, AllToAll, Exchange
from horovod_sparse.errors import ArgumentError
from horovod_sparse.sparsifiers import BucketInfo, Sparsifier
from horovod_sparse.tensorflow._horovod import is_elastic
from horovod_sparse.tensorflow.collectives import Wire, carry_out
from horovod_sparse.tensorflow.graph import HOST, HostFunctions
from horovod_sparse.tensorflow.task import Job

__all__ = ["is_looped", "looped"]

#: numbers of ranks at which rounds are compared: 1 has none, 2 has one stage, 3 has two
_SIZES = (1, 2, 3)


def is_looped(sparsifier: Sparsifier, num_elements: int) -> bool:
    """Whether a bucket's rounds are to be in a loop: in elastic training, where their number may change.

    Args:
        sparsifier: of the bucket, not resolved.
        num_elements: n.

    Example:
        >>> from horovod_sparse.sparsifiers import GTopK
        >>> is_looped(GTopK(), 100)  # not in elastic training here
        False
    """
    if not is_elastic():
        return False
    kinds = set()
    for size in _SIZES:
        try:
            resolved = sparsifier.resolved(BucketInfo("any", num_elements, 0, size))
            kinds.add(resolved.rounds(size))
        except ArgumentError:  # its arguments do not go with this size
            continue
    return len(kinds) > 1 and {kind for rounds in kinds for kind in rounds} <= {Exchange, AllGather, AllToAll}


def looped(
    job: Job,
    gradients: Sequence[tf.Tensor],
    rate: tf.Tensor,
    place: Callable[[], tuple[int, int]],
    process_set: Any,
    host: HostFunctions,
) -> tf.Tensor:
    """The operations of one synchronization, of as many rounds as `task.kinds` has when the graph runs.

    Args:
        job: whose task is `looped`.
        gradients: see `horovod_sparse.tensorflow.driver.unroll`, as for the others.
        rate: see there.
        place: see there.
        process_set: see there.
        host: see there.
    """
    task, types = job.task, [tf.int32, tf.int32, tf.bool]

    def start(rate: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
        return given(job.begin(rate, arrays, place()))

    def resume(output: np.ndarray, splits: np.ndarray) -> list[np.ndarray]:
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
            output, received = carry_out(AllToAll, buffer, splits, f"{task.name}.rounds", process_set)
            return shaped(host.run(resume, [output, received], types))

    with tf.device(HOST):
        message = shaped(host.run(start, [rate, *gradients], types))
        ended = tf.while_loop(lambda _buffer, _splits, more: more, turn, message, parallel_iterations=1)
        return tf.cast(ended[2], tf.int32)
