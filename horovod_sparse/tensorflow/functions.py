"""As `horovod.tensorflow.functions`: what is sent once, not in every step. Variables may be Keras 3's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow.functions import allgather_object as allgather_object
from horovod.tensorflow.functions import broadcast_object as broadcast_object
from horovod.tensorflow.functions import broadcast_object_fn as broadcast_object_fn

from horovod_sparse.errors import UnsupportedError
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.tensors import as_variable

#: of one message, unless a single variable is larger
_MESSAGE_BYTES = 1 << 26


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: Any = hvd.global_process_set, inplace: bool = False
) -> Any:
    """Gives all ranks the values that variables have on one of them.

    Departures from Horovod's, which a graph gets: variables of Keras 3 are taken, too, of all dtypes that
    are numbers; and they go by their order, not by their names, which Keras counts: a rank may have made
    other models before. ``model.variables`` of Keras 3 has states of random generators in it, so that
    dropout becomes the same on all ranks; ``model.weights`` has not.

    Args:
        variables: the same ones on all ranks, in the same order.
        root_rank: whose values they are.
        process_set: the ranks that take part.
        inplace: accepted for Horovod's sake: values are assigned.
    """
    every = [as_variable(variable) for variable in variables]
    if not tf.executing_eagerly():
        return hvd.broadcast_variables(every, root_rank, process_set, inplace)
    for number, group in enumerate(_messages(every)):
        _broadcast(group, root_rank, process_set, f"horovod_sparse.broadcast.{number}")
    return None


def _messages(variables: Sequence[Any]) -> list[list[Any]]:
    groups: list[list[Any]] = []
    room = 0
    for variable in variables:
        if not (variable.dtype.is_floating or variable.dtype.is_integer or variable.dtype.is_bool):
            raise UnsupportedError(f"{variable.name} holds {variable.dtype.name}, which is not broadcast")
        num_bytes = variable.shape.num_elements() * variable.dtype.size
        if not groups or num_bytes > room:
            groups.append([])
            room = _MESSAGE_BYTES
        groups[-1].append(variable)
        room -= num_bytes
    return groups


def _broadcast(variables: Sequence[Any], root_rank: int, process_set: Any, name: str) -> None:
    values = [variable.numpy() for variable in variables]
    sent = np.concatenate([np.ascontiguousarray(value).reshape(-1).view(np.uint8) for value in values])
    with tf.device("/cpu:0"):
        received = hvd.broadcast(
            tf.constant(sent), root_rank, name=name, ignore_name_scope=True, process_set=process_set
        ).numpy()
    stops = np.cumsum([value.nbytes for value in values])
    for variable, value, part in zip(variables, values, np.split(received, stops[:-1]), strict=True):
        variable.assign(part.view(value.dtype).reshape(value.shape))
