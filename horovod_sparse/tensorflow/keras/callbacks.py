"""Horovod's Keras callbacks, made to work with Keras 3 and tf-keras, and this package's own callbacks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow.keras import callbacks as stock
from horovod.tensorflow.keras.callbacks import BestModelCheckpoint as BestModelCheckpoint

from horovod_sparse.checks import check_count
from horovod_sparse.errors import ArgumentError
from horovod_sparse.tensorflow import state
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.functions import broadcast_variables
from horovod_sparse.tensorflow.keras.distributed import is_keras3
from horovod_sparse.tensorflow.tensors import as_variable, checked_variable, create_variables, variables_of
from horovod_sparse.tensorflow.waiting import Watch


class BroadcastGlobalVariablesCallback(tf.keras.callbacks.Callback):
    """Copies one rank's model and optimizer variables to all ranks when training begins.

    Variables that are created in the first batch are copied after it, as in Horovod. Residuals and states of
    random generators are not copied. A plain optimizer is an error, unless the model has a `train_step` of
    its own. Arguments are Horovod's; `local_variables` are not copied.
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Any | Sequence[Any] | None = None
    ) -> None:
        super().__init__()
        check_count("root_rank", root_rank, low=0)
        self.root_rank, self.device = root_rank, device
        self.broadcast_done = False
        #: variables that were broadcast, and variables to exclude
        self._done: set[Any] = set()
        given: Any = local_variables
        for variable in given if isinstance(given, (list, tuple, set)) else [given]:
            if variable is not None:
                self.register_local_var(variable)

    def register_local_var(self, variable: Any) -> None:
        """Excludes a variable from the broadcast."""
        self._done.add(checked_variable("local_variables", variable).ref())

    def on_train_begin(self, logs: Any = None) -> None:
        model, optimizer = self.model, self.model.optimizer
        if optimizer is not None and hvd.size() > 1 and type(model).train_step is tf.keras.Model.train_step:
            _check_distributed(optimizer)
        if not self.broadcast_done:
            if optimizer is not None and model.built:
                create_variables(optimizer, model.trainable_variables)
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self.broadcast_done:
            self._broadcast()
            self.broadcast_done = True

    def _broadcast(self) -> None:
        # not the states of random generators, variables in Keras 3: dropout is to differ from rank to rank
        variables = list(self.model.weights)
        if self.model.optimizer is not None:
            variables += variables_of(self.model.optimizer)
        refs = {as_variable(variable).ref(): as_variable(variable) for variable in variables}
        new = [variable for ref, variable in refs.items() if ref not in self._done]
        self._done.update(refs)
        if new:
            with tf.device(self.device):
                broadcast_variables(new, self.root_rank)


def _check_distributed(optimizer: Any) -> None:
    """Raises if the model's optimizer is no `DistributedOptimizer`: each rank would train alone."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    reduces = "_horovod_sparse_keeper", *(() if is_keras3(inner) else ("_allreduce_grads",))
    if any(hasattr(one, name) for one in (optimizer, inner) for name in reduces):
        return
    raise ArgumentError(
        "optimizer",
        type(inner).__name__,
        "a hvd.DistributedOptimizer(...): each rank would train alone. Keras copies an optimizer through its "
        "settings as a plain one: wrap the copy, and load a file by hvd.load_model(path, compression=...)",
    )


class MetricAverageCallback(tf.keras.callbacks.Callback):
    """Averages metrics over the ranks that have them, at the end of every epoch.

    Callbacks behind it that use metrics (`ReduceLROnPlateau`, `ModelCheckpoint`) act alike on all ranks.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is None:
            return
        own = {name: float(value) for name, value in logs.items() if np.ndim(value) == 0}
        name = "horovod_sparse.metrics"
        with tf.device(self.device), Watch(None, hvd.global_process_set).watch_eager(name):
            everyone = hvd.allgather_object(own, name=name)
        for name in dict.fromkeys(name for metrics in everyone for name in metrics):
            values = [metrics[name] for metrics in everyone if name in metrics]
            logs[name] = sum(values) / len(values)


class _RateSetter:
    """Mixin for Horovod's callbacks, which do not know Keras 3: reads and sets the learning rate.

    Momentum correction (Goyal et al. 2017, Section 3): SGD's velocity holds past learning rates, so it is
    multiplied by ``rate / rate_before`` when the rate changes. Horovod changes the momentum for one step
    instead, which comes to the same; in Keras 3 momentum is a number that was traced into the graph.
    """

    model: Any
    initial_lr: float
    multiplier: Callable[[float], float]
    momentum_correction: bool

    def _rate(self) -> float:
        return float(tf.keras.backend.get_value(self.model.optimizer.learning_rate))

    def _adjust_learning_rate(self, epoch: float) -> None:
        before, now = self._rate(), self.initial_lr * self.multiplier(epoch)
        optimizer = self.model.optimizer
        if hasattr(optimizer.learning_rate, "assign"):
            optimizer.learning_rate.assign(now)
        else:
            optimizer.learning_rate = now
        if self.momentum_correction and before and before != now:
            inner = getattr(optimizer, "inner_optimizer", optimizer)
            if (steps := getattr(inner, "_horovod_sparse_steps", None)) is not None:
                steps.rescale_velocities(now / before)
                return
            for velocity in _velocities(inner):
                velocity.assign(velocity * (now / before))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = self._rate()


class LearningRateScheduleCallback(_RateSetter, stock.LearningRateScheduleCallback):
    """Sets the learning rate to ``initial_lr * multiplier(epoch)`` from `start_epoch` to `end_epoch`.

    Arguments are those of ``horovod.tensorflow.keras.callbacks.LearningRateScheduleCallback``; `multiplier`
    is a function of the epoch, or a constant c for ``c ** (epoch - start_epoch)``.
    """


class LearningRateWarmupCallback(_RateSetter, stock.LearningRateWarmupCallback):
    """Raises the learning rate from ``initial_lr / size`` to `initial_lr` over the first epochs.

    Arguments are those of ``horovod.tensorflow.keras.callbacks.LearningRateWarmupCallback``.
    """

    verbose: int
    end_epoch: int

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch == self.end_epoch - 1 and hvd.rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}.")


def _velocities(optimizer: Any) -> list[Any]:
    """Returns a momentum optimizer's velocity variables, which contain past learning rates."""
    if not getattr(optimizer, "momentum", None):
        return []
    for name in ("momentums", "_momentums"):
        found = getattr(optimizer, name, None)
        if found:
            return [variable for variable in found if variable is not None]
    if hasattr(optimizer, "get_slot"):  # tf-keras, old kind
        return [variable for variable in optimizer.variables() if "momentum" in variable.name]
    return []


class TelemetryCallback(tf.keras.callbacks.Callback):
    """Adds the telemetry of each epoch's last step to the epoch's logs.

    So `History` has it, and callbacks behind this one: `TensorBoard`, `CSVLogger`, those of W&B and MLflow.
    """

    def __init__(self, prefix: str = "sparse/") -> None:
        super().__init__()
        self._prefix = prefix

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        telemetry = getattr(self.model.optimizer, "telemetry", None)
        if logs is not None and telemetry is not None:
            logs.update(telemetry.scalars(self._prefix))


class CheckpointCallback(tf.keras.callbacks.Callback):
    """Saves checkpoints on all ranks together, and resumes from the newest when training begins.

    Weights, the optimizer's variables, residuals and the epoch, of every rank, which take equally many
    batches. `fit` begins with the epoch after the last completed one; a checkpoint from the midst of an epoch
    goes on with its weights at the beginning of that epoch. The model has to be built before `fit`.
    Stands before `BroadcastGlobalVariablesCallback`.

    Args:
        directory: made if it is missing; the same for all ranks, or each host's own. One for each training.
        save_freq: "epoch", or a number of batches.
        keep: number of checkpoints to keep.
    """

    def __init__(
        self, directory: str | os.PathLike[str], save_freq: str | int = "epoch", keep: int = 2
    ) -> None:
        super().__init__()
        if save_freq != "epoch":
            check_count("save_freq", save_freq, "'epoch', or a number of batches of 1 or more")
        check_count("keep", keep)
        self.directory, self.save_freq, self.keep = directory, save_freq, keep
        #: epoch of the loaded checkpoint; None without one
        self.loaded_step: int | None = None
        self._num_batches, self._epoch = 0, tf.Variable(0, trainable=False, dtype=tf.int64)

    def on_train_begin(self, logs: Any = None) -> None:
        """Loads the newest checkpoint, if any rank sees one."""
        optimizer = self.model.optimizer
        if not state.has_checkpoint(self.directory, optimizer):
            return
        if not self.model.built:
            raise ArgumentError("model", type(self.model), "one that is built: model.build(...) before fit")
        create_variables(optimizer, self.model.trainable_variables)
        self.loaded_step = state.load(self.directory, optimizer, variables=self._variables())
        epoch = int(self._epoch.numpy())
        if hasattr(self.model, "_initial_epoch"):
            self.model._initial_epoch = epoch  # where Keras' BackupAndRestore puts it
        else:
            self.model._training_state = _InitialEpoch(epoch)

    def on_train_end(self, logs: Any = None) -> None:
        if hasattr(self.model, "_initial_epoch"):
            self.model._initial_epoch = None
        elif isinstance(getattr(self.model, "_training_state", None), _InitialEpoch):
            self.model._training_state = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch.assign(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.save_freq == "epoch":
            self._epoch.assign(epoch + 1)
            self._save()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._num_batches += 1
        if self.save_freq != "epoch" and self._num_batches % int(self.save_freq) == 0:
            self._save()

    def _save(self) -> None:
        state.save(self.directory, self.model.optimizer, self.keep, variables=self._variables())

    def _variables(self) -> list[Any]:
        # with states of random generators, where they are variables: they are this rank's own
        every = [self._epoch, *self.model.variables, *variables_of(self.model.optimizer)]
        return list({as_variable(variable).ref(): variable for variable in every}.values())


class _InitialEpoch:
    """Makes tf-keras' `fit` begin at the epoch of the checkpoint, as BackupAndRestore does."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def maybe_load_initial_counters_from_ckpt(
        self, _steps: Any, _epoch: int, **_mode: Any
    ) -> tuple[int, int]:
        return self._epoch, 0
