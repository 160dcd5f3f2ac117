"""`PartialDistributedOptimizer` for Keras: some layers' gradients stay local."""

from __future__ import annotations

from typing import Any

from horovod_sparse.errors import ArgumentError
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.arguments import checked_layers
from horovod_sparse.tensorflow.compression import Compression
from horovod_sparse.tensorflow.keras.optimizer import DistributedOptimizer

__all__ = ["PartialDistributedOptimizer"]


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = hvd.Average,
    groups: Any = None,
    process_set: Any = hvd.global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    **more: Any,
) -> Any:
    """As `DistributedOptimizer`, but the gradients of some layers stay local.

    Arguments and order are those of ``horovod.keras.PartialDistributedOptimizer``.

    Args:
        optimizer: see `DistributedOptimizer`, as for all other arguments.
        name: see there.
        device_dense: see there.
        device_sparse: see there.
        compression: see there.
        sparse_as_dense: see there.
        gradient_predivide_factor: see there.
        op: see there.
        groups: see there.
        process_set: see there.
        local_layers: a layer, or several; built already.
        scale_local_gradients: see there.
        **more: see there: what Horovod's function does not take.

    Raises:
        ArgumentError: if something in `local_layers` is no layer, or is not built yet.
    """
    layers = checked_layers(local_layers)
    if not all(layer.built for layer in layers):
        raise ArgumentError(
            "local_layers", local_layers, "layers that are built: they have no variables before"
        )
    wrapped = DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        **more,
    )
    for layer in layers:
        for variable in layer.trainable_weights:
            wrapped.register_local_var(variable)
    return wrapped
