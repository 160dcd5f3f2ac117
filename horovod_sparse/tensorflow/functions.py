"""Replaces `horovod.tensorflow.functions` (broadcasts), so that variables may be Keras 3's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from horovod.tensorflow.functions import *  # noqa: F403

from horovod_sparse.errors import UnsupportedError
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.tensors import as_variable, is_comparable


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: Any = hvd.global_process_set, inplace: bool = False
) -> Any:
    """Copies the values of variables from one rank to all ranks.

    Departures from Horovod's, which a graph gets: variables of Keras 3 are taken, too, of all dtypes that
    are numbers; and they go by their order, not by their names, which Keras counts: a rank may have made
    other models before. ``model.variables`` of Keras 3 has states of random generators in it, so that
    dropout becomes the same on all ranks; ``model.weights`` has not. Values are always assigned, whatever
    `inplace` says.
    """
    every = [as_variable(variable) for variable in variables]
    if not tf.executing_eagerly():
        return hvd.broadcast_variables(every, root_rank, process_set, inplace)
    for variable in every:
        if not is_comparable(variable):
            raise UnsupportedError(f"leave {variable.name} out: {variable.dtype.name} cannot be broadcast")

    def broadcast_and_assign() -> None:
        for number, variable in enumerate(every):
            value, bits = variable.read_value(), tf.cast if variable.dtype == tf.bool else tf.bitcast
            received = hvd.broadcast(
                bits(value, tf.uint8),
                root_rank,
                name=f"horovod_sparse.broadcast.{number}",
                ignore_name_scope=True,
                process_set=process_set,
            )
            variable.assign(bits(received, variable.dtype))

    with tf.device("/cpu:0"):
        tf.function(broadcast_and_assign, autograph=False)()  # in a graph Horovod fuses all broadcasts
    return None
