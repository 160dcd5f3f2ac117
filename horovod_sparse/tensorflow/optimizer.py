"""`DistributedOptimizer` by its name in `horovod.tensorflow`: of Keras and of TensorFlow 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from horovod_sparse.errors import UnsupportedError
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.arguments import Arguments
from horovod_sparse.tensorflow.compression import Compression
from horovod_sparse.training.settings import PlannedOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
    **options: Unpack[PlannedOptions],
) -> Any:
    """Wraps an optimizer; arguments and order are those of ``horovod.tensorflow.DistributedOptimizer``.

    Optimizers of Keras go to `horovod_sparse.tensorflow.keras.DistributedOptimizer`, with `op` and `groups`,
    which Horovod drops on that way. Optimizers of TensorFlow 1 go to Horovod's own, without a sparsifier.

    Args:
        optimizer: of Keras, or `tf.compat.v1.train.Optimizer`.
        use_locking: of optimizers of TensorFlow 1. All other arguments are those of
            `horovod_sparse.tensorflow.keras.DistributedOptimizer`.

    Raises:
        ArgumentError: for an argument that is not allowed.
        UnsupportedError: for a sparsifier with an optimizer of TensorFlow 1.
    """
    arguments = Arguments.of(locals(), DistributedOptimizer).parsed()
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        from horovod_sparse.tensorflow.keras import optimizer as of_keras  # Keras is slow to import

        return of_keras.DistributedOptimizer(optimizer, **arguments.taken_by(of_keras.DistributedOptimizer))
    if arguments.is_sparse:
        raise UnsupportedError(
            f"{type(optimizer).__name__} is an optimizer of TensorFlow 1, which runs in sessions: use one of "
            "Keras, or a DistributedGradientTape, or compression=Compression.none"
        )
    arguments.refuse_sparse()
    return hvd.DistributedOptimizer(optimizer, **arguments.taken_by(hvd.DistributedOptimizer))
