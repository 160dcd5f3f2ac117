"""Callbacks that steer the learning rate: schedules by epoch, and warm-up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from horovod_sparse.errors import ArgumentError
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.keras.variables import plain_optimizer

__all__ = ["LearningRateScheduleCallback", "LearningRateWarmupCallback"]

_log = logging.getLogger("horovod_sparse")


class LearningRateScheduleCallback(tf.keras.callbacks.Callback):
    """Sets the learning rate to ``initial_lr * multiplier(epoch)`` from `start_epoch` to `end_epoch`.

    Error feedback can follow: with `scale_residual` residuals are scaled when the learning rate changes (see
    `ErrorFeedback`).

    Momentum correction (Goyal et al. 2017, Section 3): SGD's velocity holds past learning rates, so it is
    multiplied by ``rate / rate_before`` when the rate changes. Horovod changes the momentum for one step
    instead, which comes to the same; in Keras 3 momentum is a number that was traced into the graph.

    Args:
        initial_lr: learning rate of the optimizer when training starts.
        multiplier: a function of the epoch, or a constant c for ``c ** (epoch - start_epoch)``.
        start_epoch: first epoch in which it acts.
        end_epoch: first one in which it does no more; None for never.
        staircase: whether it acts once per epoch, with whole numbers; otherwise in every batch, with
            ``epoch + batch / steps_per_epoch``.
        momentum_correction: see above.
        steps_per_epoch: read from the training's parameters if left out.

    Raises:
        ArgumentError: if `initial_lr` is missing.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ArgumentError("initial_lr", initial_lr, "the optimizer's learning rate at the start")
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.staircase, self.momentum_correction = staircase, momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        if callable(multiplier):
            self.multiplier: Callable[[float], float] = multiplier
        else:
            factor = multiplier
            self.multiplier = lambda epoch: factor ** (epoch - start_epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        """Finds out how many steps an epoch has."""
        if self.steps_per_epoch is None and not self.staircase:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ArgumentError(
                    "steps_per_epoch", None, "their number: this training does not know how many it does"
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remembers the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the rate."""
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if self.staircase:
            if batch == 0:
                self._adjust(epoch)
        elif self.steps_per_epoch:
            self._adjust(epoch + batch / self.steps_per_epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reports the rate as ``lr``, as Horovod does."""
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        return float(tf.keras.backend.get_value(self.model.optimizer.learning_rate))

    def _adjust(self, epoch: float) -> None:
        before, now = self._rate(), self.initial_lr * self.multiplier(epoch)
        optimizer = self.model.optimizer
        if hasattr(optimizer.learning_rate, "assign"):
            optimizer.learning_rate.assign(now)
        else:
            optimizer.learning_rate = now
        if self.momentum_correction and before and before != now:
            for velocity in _velocities(plain_optimizer(optimizer)):
                velocity.assign(velocity * (now / before))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / size`` to `initial_lr` over the first epochs.

    ``lr(epoch) = initial_lr / size * (epoch * (size - 1) / warmup_epochs + 1)``, with the epoch's fraction
    counted at the end of a batch, as in Horovod.

    Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD".

    Args:
        initial_lr: learning rate of the optimizer, for all ranks together.
        warmup_epochs: over which it is raised.
        momentum_correction: see `LearningRateScheduleCallback`.
        steps_per_epoch: see there.
        verbose: 1 for a line on rank 0 when warm-up ends.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            at_end = epoch + 1.0 / (self.steps_per_epoch or 1)
            return (at_end * (hvd.size() - 1) / warmup_epochs + 1) / hvd.size()

        super().__init__(
            initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reports the rate, and the end of warm-up."""
        super().on_epoch_end(epoch, logs)
        if self.verbose and self.end_epoch is not None and epoch == self.end_epoch - 1 and hvd.rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}.")


def _velocities(optimizer: Any) -> list[Any]:
    """The variables that hold past learning rates: of optimizers that have a momentum."""
    if not getattr(optimizer, "momentum", None):
        return []
    for name in ("momentums", "_momentums"):
        found = getattr(optimizer, name, None)
        if found:
            return [variable for variable in found if variable is not None]
    if hasattr(optimizer, "get_slot"):  # tf-keras, old kind
        return [variable for variable in optimizer.variables() if "momentum" in variable.name]
    return []
