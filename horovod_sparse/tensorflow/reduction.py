"""`allreduce` of TensorFlow's tensors that sends sparsely: Horovod's, with a sparsifier as compression."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.tensorflow import sums
from horovod_sparse.tensorflow._horovod import hvd, present_start
from horovod_sparse.tensorflow.collectives import carry_out_together
from horovod_sparse.tensorflow.compression import Compression, SparseCompressor
from horovod_sparse.tensorflow.graph import refuse_graphs
from horovod_sparse.tensorflow.tensors import dtype_name, times
from horovod_sparse.training import allreduce as common
from horovod_sparse.training.agreement import compared

_call_names = common.CallNames()


@tf.autograph.experimental.do_not_convert
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: Any = hvd.global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Sums or averages a tensor over ranks, of which each sends what a sparsifier selects.

    The equation, what ranks compare, and errors are those of `horovod_sparse.torch.allreduce`; arguments and
    order are those of ``horovod.tensorflow.allreduce``. In a `tf.function` the sum is taken on the host, and
    errors are TensorFlow's, with the text of ours. With a compression that is no sparsifier, and for integers
    and `tf.IndexedSlices`, it is Horovod's function.

    Args:
        tensor: of the same shape and dtype on all ranks.
        average, device_dense, device_sparse, ignore_name_scope: see Horovod.
        compression: a sparsifier, text for `Compression.parse`, or one of Horovod's compressors.
        op: Average (default) or Sum.
        prescale_factor: factor of the tensor, before elements are selected.
        postscale_factor: factor of the sum.
        name: the same on all ranks; without one it is the tensor's in a graph, else calls are counted.
        process_set: the ranks that take part.

    Returns:
        A tensor of the shape and dtype of `tensor`, the same on all ranks.

    Raises:
        ArgumentError: for another op, or a process set without this rank.
        UnsupportedError: for op=Adasum, a gradient through the sum, ``jit_compile=True``, or TensorFlow 1.
        StateMismatchError: on all ranks, if they do not give the same shape, dtype or arguments.
        NonFiniteGradientError: on all ranks, if a NaN or Inf is in one rank's tensor, or in the sum.

    Example:
        >>> import horovod_sparse.tensorflow as hvd; hvd.init()  # doctest: +SKIP
        >>> tensor = tf.constant([1.0, -4.0, 2.0])
        >>> hvd.allreduce(tensor, compression="topk:density=0.4").numpy()  # doctest: +SKIP
        array([ 0., -4.,  0.], dtype=float32)
    """
    if isinstance(compression, str):
        compression = Compression.parse(compression)
    sparsifies = isinstance(compression, SparseCompressor) and not isinstance(tensor, tf.IndexedSlices)
    if sparsifies:
        tensor = tf.convert_to_tensor(tensor)
    if not sparsifies or dtype_name(tensor.dtype) is None:
        factors, devices = (prescale_factor, postscale_factor), (device_dense, device_sparse)
        last = name, process_set, ignore_name_scope
        return hvd.allreduce(tensor, average, *devices, compression, op, *factors, *last)
    refuse_graphs()
    chosen, scale = common.scale_of(hvd, op, average, postscale_factor, process_set)
    if name is None:
        eagerly = tf.executing_eagerly()
        name = _call_names.next(present_start(), process_set) if eagerly else tensor.name.replace(":", ".")
    label, recipe = name, compression.recipe

    def together(array: np.ndarray) -> np.ndarray:
        facts = common.agreed_facts(
            *(recipe, array.shape, array.dtype.name, process_set),
            op=chosen,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
        )
        total, coroutine = array, compared(facts)
        if array.size:
            total, work = sums.prepared(
                array, recipe, label, (int(process_set.rank()), int(process_set.size()))
            )
            coroutine = common.summed(*work, facts, scale)
        carry_out_together(coroutine, process_set, f"horovod_sparse.allreduce.{label}")
        return total

    return sums.on_host(together, tensor if prescale_factor == 1.0 else times(tensor, prescale_factor))
