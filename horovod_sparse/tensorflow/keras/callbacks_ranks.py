"""Callbacks that make the ranks agree: about variables, about metrics, and about who writes a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.errors import ArgumentError
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.keras.variables import broadcast, model_variables, optimizer_variables
from horovod_sparse.tensorflow.tensors import as_variable

__all__ = ["BestModelCheckpoint", "BroadcastGlobalVariablesCallback", "MetricAverageCallback"]


class BroadcastGlobalVariablesCallback(tf.keras.callbacks.Callback):
    """Gives all ranks the model's and the optimizer's variables of one of them when training starts.

    Before the first batch, where the model is built by then (`fit` of Keras 3 builds it); what does not
    exist yet follows after the first batch, as in Horovod. Residuals stay each rank's own, and so do
    states of random generators.

    Args:
        root_rank: whose variables they are.
        device: where the broadcast happens.
        local_variables: variables that are left alone.
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Any | Sequence[Any] | None = None
    ) -> None:
        super().__init__()
        self.root_rank, self.device = root_rank, device
        self.broadcast_done = False
        self._done: set[Any] = set()
        self._local: set[Any] = set()
        if local_variables is None:
            local_variables = []
        elif not isinstance(local_variables, (list, tuple, set)):
            local_variables = [local_variables]
        for variable in local_variables:
            self.register_local_var(variable)

    def register_local_var(self, variable: Any) -> None:
        """Leaves a variable alone.

        Raises:
            ArgumentError: if it is none.
        """
        variable = as_variable(variable)
        if not hasattr(variable, "ref"):
            raise ArgumentError("local_variables", variable, "variables of TensorFlow or Keras")
        self._local.add(variable.ref())

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcasts what is there."""
        model, optimizer = self.model, self.model.optimizer
        if not self.broadcast_done and model.built:
            if optimizer is not None and hasattr(optimizer, "build") and not _is_built(optimizer):
                optimizer.build(model.trainable_variables)
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcasts what the first batch has made."""
        if not self.broadcast_done:
            self._broadcast()
            self.broadcast_done = True

    def _broadcast(self) -> None:
        variables = [*model_variables(self.model)]
        if self.model.optimizer is not None:
            variables += optimizer_variables(self.model.optimizer)
        refs = {variable.ref(): variable for variable in variables}
        new = [variable for ref, variable in refs.items() if ref not in self._done | self._local]
        self._done.update(refs)
        with tf.device(self.device):
            broadcast(new, self.root_rank)


class MetricAverageCallback(tf.keras.callbacks.Callback):
    """Averages metrics over ranks at the end of every epoch.

    Stands before callbacks that use metrics (`ReduceLROnPlateau`, `ModelCheckpoint`, ...), which then act
    alike on all ranks.

    Args:
        device: where the sum is taken.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replaces numbers in `logs`; the ranks must have the same ones."""
        if not logs:
            return
        names = sorted(name for name, value in logs.items() if np.ndim(value) == 0)
        with tf.device(self.device):
            values = tf.constant([float(logs[name]) for name in names], tf.float64)
            averages = hvd.allreduce(values, op=hvd.Average, name=f"horovod_sparse.metrics.{len(names)}")
        logs.update(zip(names, averages.numpy().tolist(), strict=True))


class BestModelCheckpoint(tf.keras.callbacks.ModelCheckpoint):
    """`ModelCheckpoint` with ``save_best_only``, written by rank 0 alone.

    Put `MetricAverageCallback` before it, if `monitor` is a metric that ranks measure separately.

    Args:
        monitor: see `keras.callbacks.ModelCheckpoint`, as for the others.
        verbose: see there.
        save_weights_only: see there.
        mode: see there.
        save_freq: see there.
        filepath: see there.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
        filepath: str | None = None,
    ) -> None:
        default = "best.weights.h5" if save_weights_only else "best.keras"
        super().__init__(
            filepath or default,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )

    def _save_model(self, *args: Any, **arguments: Any) -> None:
        if hvd.rank() == 0:
            super()._save_model(*args, **arguments)


def _is_built(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "built", getattr(optimizer, "_built", False)))
