"""Replaces `horovod.tensorflow.keras.elastic`: state and callbacks, also of Keras 3's models."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from horovod.tensorflow.keras.elastic import *  # noqa: F403

from horovod_sparse.tensorflow.elastic import TensorFlowKerasState
from horovod_sparse.tensorflow.elastic import run as run


class KerasState(TensorFlowKerasState):
    """Another name of `TensorFlowKerasState`, without its argument `backend`."""

    def __init__(self, model: Any, optimizer: Any = None, **attributes: Any) -> None:
        super().__init__(model, optimizer, backend=tf.keras.backend, **attributes)
