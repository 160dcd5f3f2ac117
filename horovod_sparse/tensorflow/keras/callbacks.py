"""Horovod's Keras callbacks, for Keras 3 and for tf-keras; Horovod's own fail with Keras 3."""

from __future__ import annotations

from horovod_sparse.tensorflow.keras.callbacks_plan import ReplanCallback
from horovod_sparse.tensorflow.keras.callbacks_ranks import (
    BestModelCheckpoint,
    BroadcastGlobalVariablesCallback,
    MetricAverageCallback,
)
from horovod_sparse.tensorflow.keras.callbacks_rates import (
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
)

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "ReplanCallback",
]
