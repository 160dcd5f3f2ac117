"""Holding back what has come through first until all has come through, without a thread that waits."""

from __future__ import annotations

import tensorflow as tf

__all__ = ["Gate"]

_CAPACITY = 1 << 30


class Gate:
    """A queue of tickets: whoever comes last puts in one for everybody, and everybody takes one.

    Taking is an asynchronous operation. The queue is found by its name at every place where it is used:
    operations on one captured resource would be put into an order, and wait for each other.

    Args:
        name: of the queue, unique in this process.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def _queue(self) -> tf.Tensor:
        return tf.raw_ops.FIFOQueueV2(
            component_types=[tf.int32], shapes=[[]], capacity=_CAPACITY, shared_name=self._name
        )

    def pass_through(self, tickets: tf.Tensor) -> tf.Tensor:
        """Puts tickets in, and takes one, when there is one.

        Args:
            tickets: int32 [any], as many as are to pass.

        Returns:
            int32 [], the ticket.
        """
        queue = self._queue()
        put = tf.raw_ops.QueueEnqueueManyV2(handle=queue, components=[tickets])
        with tf.control_dependencies([put]):
            return tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.int32])[0]

    def empty(self) -> None:
        """Throws away the tickets that a step has left that ended in an error. Called on the host."""
        with tf.init_scope(), tf.device("/cpu:0"):
            queue = self._queue()
            left = tf.raw_ops.QueueSizeV2(handle=queue)
            if int(left):
                tf.raw_ops.QueueDequeueManyV2(handle=queue, n=left, component_types=[tf.int32])
