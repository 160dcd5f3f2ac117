"""Has what `horovod.tensorflow.elastic` has: states that survive failures, of Keras 3, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from horovod.common.elastic import ObjectState
from horovod.tensorflow import elastic as stock

from horovod_sparse.errors import ArgumentError
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.functions import broadcast_variables
from horovod_sparse.tensorflow.state import WithState
from horovod_sparse.tensorflow.tensors import as_variable, build, variables_of

run = stock.run


class _VariableState:
    """Saves, restores and broadcasts variables (also of Keras 3) for Horovod's elastic training.

    Departure from Horovod's: variables are broadcast by `sync`, which every start of Horovod calls on all
    ranks, and not when a state is made, which a worker that joins does alone.
    """

    def _init_state(self, attributes: dict[str, Any]) -> None:
        self._save_model()
        ObjectState.__init__(self, bcast_object=hvd.broadcast_object, get_rank=hvd.rank, **attributes)

    def sync(self) -> None:
        """Broadcasts rank 0's variables to all ranks, and saves them."""
        broadcast_variables(self._all_variables(), 0)
        self._save_model()
        ObjectState.sync(self)

    def _all_variables(self) -> Sequence[Any]:
        raise NotImplementedError

    def _save_model(self) -> None:
        self._values = [(variable, variable.numpy()) for variable in map(as_variable, self._all_variables())]

    def _load_model(self) -> None:
        for variable, value in self._values:
            variable.assign(value)


class TensorFlowKerasState(_VariableState, stock.TensorFlowKerasState):
    """The state of a model and its optimizer for ``hvd.elastic.run``.

    Departures from Horovod's: models of Keras 3 are taken; the optimizer gets its variables here, so that
    a worker that joins has as many as the others; states of random generators stay each rank's own, and
    so do residuals, which are saved and restored with the optimizer.

    Args:
        model: of Keras, built.
        optimizer: the model's if left out.
        backend: accepted for Horovod's sake.
        **attributes: more that is saved and synchronized, as attributes of this object.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **attributes: Any) -> None:
        if not getattr(model, "built", True):
            raise ArgumentError("model", model.name, "a model that is built: model.build(input_shape)")
        self.model, self.optimizer, self.backend = model, optimizer or model.optimizer, backend
        if self.optimizer is None:
            raise ArgumentError("optimizer", None, "an optimizer, or compile the model with one")
        build(self.optimizer, model.trainable_variables)
        self._init_state(attributes)

    def _all_variables(self) -> Sequence[Any]:
        return [*self.model.weights, *variables_of(self.optimizer)]

    def _save_model(self) -> None:
        super()._save_model()
        ours = isinstance(self.optimizer, WithState)
        self._residuals = self.optimizer.state_dict() if ours else None

    def _load_model(self) -> None:
        super()._load_model()
        if isinstance(self.optimizer, WithState):  # which cancels a step that has failed
            self.optimizer.load_state_dict(self._residuals)


class TensorFlowState(_VariableState, stock.TensorFlowState):
    """The state of a list of variables for ``hvd.elastic.run``.

    Args:
        variables: to be kept.
        session: accepted for Horovod's sake: must be None.
        **attributes: more that is saved and synchronized, as attributes of this object.
    """

    def __init__(
        self, variables: Iterable[Any] | None = None, session: Any = None, **attributes: Any
    ) -> None:
        self.variables, self.session = list(variables or ()), session
        if not self.variables:
            raise ArgumentError("variables", variables, "a list of variables: eager TensorFlow keeps none")
        self._init_state(attributes)

    def _all_variables(self) -> Sequence[Any]:
        return self.variables
