"""Momentum is applied once: by the feedback, or by the optimizer."""

from __future__ import annotations

import logging
from typing import Any

import tensorflow as tf

from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import MomentumCorrection, Recipe

__all__ = ["refuse_double_momentum"]

_log = logging.getLogger("horovod_sparse")


def refuse_double_momentum(recipe: Recipe, optimizer: Any) -> None:
    """Refuses an optimizer that would apply momentum after momentum correction has.

    An optimizer with moments of another kind (Adam) is only warned of, as with PyTorch.

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
    if not isinstance(recipe.feedback, MomentumCorrection):
        return
    with tf.init_scope():  # settings may be variables, and this be a graph
        settings = getattr(optimizer, "inner_optimizer", optimizer).get_config()
    if given := settings.get("momentum"):
        raise ArgumentError(
            "momentum",
            float(given),
            "momentum=0 to the optimizer, since the feedback "
            f"MomentumCorrection(momentum={recipe.feedback.momentum}) applies momentum before selection; "
            'or feedback="error" to the compression, to leave momentum to the optimizer',
        )
    if "beta_1" in settings:
        _log.warning(
            "momentum correction is made for SGD without momentum; this optimizer smooths gradients itself"
        )
