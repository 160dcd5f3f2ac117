"""What a feedback that applies momentum, or learning rates, must know of Keras' optimizers."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod_sparse.feedback import Recipe
from horovod_sparse.frontend.momentum import check_momentum

__all__ = ["refuse_double_momentum"]

#: settings that only optimizers have which adapt to gradients: Adam and its kin, RMSprop, Adagrad, Ftrl
_MOMENTS = {"beta_1", "epsilon", "rho", "initial_accumulator_value"}


def refuse_double_momentum(recipe: Recipe, optimizer: Any) -> None:
    """Refuses an optimizer that would apply momentum after momentum correction; see `check_momentum`.

    Args:
        recipe: of the compressor.
        optimizer: of Keras 3 or tf-keras; one that scales the loss is looked into.

    Raises:
        ArgumentError: the optimizer has momentum, and the feedback is `MomentumCorrection`.

    Example:
        >>> from horovod_sparse.feedback import recipe
        >>> sgd = tf.keras.optimizers.SGD(0.1, momentum=0.9)
        >>> refuse_double_momentum(recipe("dgc", feedback="momentum"), sgd)
        Traceback (most recent call last):
        horovod_sparse.errors.ArgumentError: momentum=0.9 is not allowed: give momentum=0 to the optimizer...
    """

    def of_optimizer() -> tuple[float, bool]:
        with tf.init_scope():  # settings may be variables, and this be a graph
            settings = getattr(optimizer, "inner_optimizer", optimizer).get_config()
        return float(settings.get("momentum") or 0.0), bool(_MOMENTS & set(settings))

    check_momentum(recipe, of_optimizer)
