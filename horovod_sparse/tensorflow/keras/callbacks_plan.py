"""A callback that changes to the plan that measured times lead to, in the middle of `fit`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

__all__ = ["ReplanCallback"]


class ReplanCallback(tf.keras.callbacks.Callback):
    """Calls the optimizer's `replan` once its first steps are measured, and has the step traced again.

    For ``DistributedOptimizer(..., merging="optimal")`` and the like. All ranks have taken as many steps by
    then, so all do so after the same batch. Without a need for times it does nothing.

    Example:
        >>> callbacks = [ReplanCallback()]
    """

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Looks whether enough is measured."""
        optimizer = self.model.optimizer
        if getattr(optimizer, "is_measured", False):
            optimizer.replan()
            # `fit` looks the function up before every batch
            self.model.make_train_function(force=True)
