"""What a synchronizer remembers, as a part of `tf.train.Checkpoint`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod_sparse.frontend.encoding import from_bytes, to_bytes
from horovod_sparse.tensorflow.state import StateKeeper

__all__ = ["CheckpointedState"]


class CheckpointedState(tf.train.experimental.PythonState):
    """Residuals and sparsifier states in a checkpoint; differs from rank to rank.

    Args:
        keeper: of the synchronizer.
    """

    def __init__(self, keeper: StateKeeper) -> None:
        super().__init__()
        self._keeper = keeper

    def serialize(self) -> bytes:
        """Called when a checkpoint is saved."""
        return to_bytes(self._keeper.state_dict())

    def deserialize(self, string_value: Any) -> None:
        """Called when a checkpoint is restored."""
        value = string_value.numpy() if hasattr(string_value, "numpy") else string_value
        self._keeper.load_state_dict(from_bytes(value))
