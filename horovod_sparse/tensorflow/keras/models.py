"""`load_model`: a saved model with a distributed optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from horovod_sparse.tensorflow.compression import Compression
from horovod_sparse.tensorflow.keras.optimizer import DistributedOptimizer, is_keras3

__all__ = ["load_model"]


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
    **arguments: Any,
) -> Any:
    """Loads a saved model, and wraps its optimizer, whose state is kept.

    Args:
        filepath: of the model.
        custom_optimizers: classes of optimizers that are not in Keras.
        custom_objects: names and classes that the file refers to.
        compression: see `DistributedOptimizer`.
        legacy_opts: accepted for Horovod's sake: the file knows which optimizer it holds.
        **arguments: more for `DistributedOptimizer`.

    Returns:
        A compiled model. Residuals start at zero under tf-keras; under Keras 3 a file that a rank saved
        has this rank's. From a SavedModel folder of tf-keras Keras restores the weights, and no state of the
        optimizer; so does this.
    """
    known = {cls.__name__: cls for cls in custom_optimizers or ()} | dict(custom_objects or {})
    model = tf.keras.models.load_model(filepath, custom_objects=known)
    restored = model.optimizer
    model.optimizer = DistributedOptimizer(restored, compression=compression, **arguments)
    if is_keras3(restored):  # variables are taken over already; residuals are in the file alone
        if str(filepath).endswith(".keras"):
            model.load_weights(filepath)
    elif hasattr(restored, "_create_all_weights"):
        model.optimizer._create_all_weights(model.trainable_variables)
        if weights := restored.get_weights():  # files of format "keras" have none of the old kind
            model.optimizer.set_weights(weights)
    else:
        restored.build(model.trainable_variables)  # of a SavedModel it is not
        model.optimizer.build(model.trainable_variables)
        for variable, value in zip(model.optimizer.variables, restored.variables, strict=True):
            variable.assign(value)
    return model
