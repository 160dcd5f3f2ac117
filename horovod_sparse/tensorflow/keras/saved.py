"""What an optimizer of Keras 3 remembers beside its variables, in files of Keras and of TensorFlow."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from horovod_sparse.frontend.encoding import from_bytes, to_bytes
from horovod_sparse.tensorflow.checkpoint import CheckpointedState

__all__ = ["KerasState"]

_KEY = "state"

#: what Keras 3 looks for when it saves an object's attributes, and does not export
_Saveable: Any = next(
    (cls for cls in keras.optimizers.Optimizer.__mro__ if cls.__name__ == "KerasSaveable"), object
)


class KerasState(CheckpointedState, _Saveable):
    """Saved beside the optimizer's variables (`BackupAndRestore`, ``model.save``), not among them.

    An optimizer that is not distributed passes over it.

    Args:
        keeper: of the synchronizer.
    """

    def _obj_type(self) -> str:
        # Keras knows no others than its own; of this one it expects nothing
        return "Loss"

    def save_own_variables(self, store: Any) -> None:
        """Called by Keras."""
        store[_KEY] = np.frombuffer(to_bytes(self._keeper.state_dict()), np.uint8)

    def load_own_variables(self, store: Any) -> None:
        """Called by Keras; after a dense run there is nothing to load, and no residual."""
        known = _KEY in store.keys()  # noqa: SIM118 (Keras' stores are no mappings)
        self._keeper.load_state_dict(from_bytes(np.asarray(store[_KEY]).tobytes()) if known else None)
