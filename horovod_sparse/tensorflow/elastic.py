"""Replaces `horovod.tensorflow.elastic`: states that survive failures, also of Keras 3's models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from horovod.common.elastic import ObjectState
from horovod.tensorflow import elastic as stock

from horovod_sparse.errors import ArgumentError
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.functions import broadcast_variables
from horovod_sparse.tensorflow.state import WithState
from horovod_sparse.tensorflow.tensors import as_variable, create_variables, variables_of

#: words of errors after which ranks restart from their last state; unknown errors name only the operation
_PEER_IS_GONE = ("HorovodInternalError", "Horovod has been shut down"), ("HorovodAll", "HorovodBroadcast")


def run(function: Any) -> Any:
    """Replaces Horovod's `run`: retries after a lost rank; raises other errors, which Horovod's may drop."""

    def train_or_translate_error(state: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return function(state, *arguments, **named)
        except tf.errors.OpError as error:
            always, if_unknown = (any(words in error.message for words in some) for some in _PEER_IS_GONE)
            if not isinstance(error, tf.errors.UnknownError) and not always:
                raise
            raise (stock.HorovodInternalError if always or if_unknown else RuntimeError)(
                error.message
            ) from error

    return stock.run(train_or_translate_error)


class _VariableState:
    """Saves, restores and broadcasts variables (also of Keras 3) for Horovod's elastic training.

    Departure from Horovod's: variables are broadcast by `sync`, which every start of Horovod calls on all
    ranks, and not when a state is made, which a worker that joins does alone.
    """

    _all_variables: Any

    def _init_state(self, attributes: dict[str, Any]) -> None:
        self._save_model()
        ObjectState.__init__(self, bcast_object=hvd.broadcast_object, get_rank=hvd.rank, **attributes)

    def sync(self) -> None:
        """Broadcasts rank 0's variables to all ranks, and saves them."""
        broadcast_variables(self._all_variables(), 0)
        self._save_model()
        ObjectState.sync(self)

    def _save_model(self) -> None:
        self._values = [(variable, variable.numpy()) for variable in map(as_variable, self._all_variables())]

    def _load_model(self) -> None:
        for variable, value in self._values:
            variable.assign(value)


class TensorFlowKerasState(_VariableState, stock.TensorFlowKerasState):
    """Saves and restores a model, its optimizer and residuals in ``hvd.elastic.run``; syncs no residuals.

    Departures from Horovod's: models of Keras 3 are taken; the optimizer gets its variables here, so that
    a worker that joins has as many as the others; states of random generators stay each rank's own, as
    residuals do. `backend` has no use.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **attributes: Any) -> None:
        if not getattr(model, "built", True):
            raise ArgumentError("model", model.name, "a model that is built: model.build(input_shape)")
        self.model, self.optimizer, self.backend = model, optimizer or model.optimizer, backend
        if self.optimizer is None:
            raise ArgumentError("optimizer", None, "an optimizer, or compile the model with one")
        create_variables(self.optimizer, model.trainable_variables)
        self._init_state(attributes)

    def _all_variables(self) -> Sequence[Any]:
        return [*self.model.weights, *variables_of(self.optimizer)]

    def _save_model(self) -> None:
        super()._save_model()
        self._residuals = self.optimizer.state_dict() if isinstance(self.optimizer, WithState) else None

    def _load_model(self) -> None:
        super()._load_model()
        if isinstance(self.optimizer, WithState):  # which cancels a step that has failed
            self.optimizer.load_state_dict(self._residuals)


class TensorFlowState(_VariableState, stock.TensorFlowState):
    """Saves, restores and broadcasts variables (no residuals) in ``elastic.run``; `session` must be None."""

    def __init__(self, variables: Any = None, session: Any = None, **attributes: Any) -> None:
        self.variables, self.session = list(variables or ()), session
        if not self.variables:
            raise ArgumentError("variables", variables, "a list of variables: eager TensorFlow keeps none")
        self._init_state(attributes)

    def _all_variables(self) -> Sequence[Any]:
        return self.variables
