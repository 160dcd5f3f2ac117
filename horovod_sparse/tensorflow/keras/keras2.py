"""Optimizers of Keras 2 (tf-keras): Horovod's own wrapper, with our reduction in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from horovod_sparse.errors import UnsupportedError
from horovod_sparse.tensorflow.checkpoint import CheckpointedState
from horovod_sparse.tensorflow.keras.reduction import SparseReducer
from horovod_sparse.tensorflow.synchronizer import GradientSynchronizer

__all__ = ["attach"]


class _Reduce:
    """Called by Horovod's optimizers, and by their helpers that add up several passes."""

    def __init__(self, optimizer: Any, reducer: SparseReducer) -> None:
        self._optimizer, self.reducer = optimizer, reducer

    def __call__(self, grads: Sequence[Any], vars: Sequence[Any] = (), **_names: Any) -> list[Any]:
        return self.reducer.reduce(grads, vars, _learning_rate(self._optimizer))


def attach(wrapped: Any, reducer: SparseReducer, again: Callable[[Any], Any]) -> Any:
    """Puts a sparse reduction into what Horovod has made of an optimizer.

    Local variables, several passes per step and scaling stay Horovod's.

    Args:
        wrapped: by `horovod.tensorflow.keras.DistributedOptimizer`.
        reducer: of the gradients.
        again: wraps another optimizer in the same way.
    """
    if not hasattr(wrapped, "_allreduce_grads"):
        raise UnsupportedError(f"{type(wrapped).__name__} is no optimizer that Horovod can wrap")
    reduce = _Reduce(wrapped, reducer)
    helper = wrapped._agg_helper
    # past Keras' own __setattr__, which follows what it is given
    object.__setattr__(wrapped, "_allreduce_grads", reduce)
    if helper is not None:
        helper.allreduce_grads = reduce
    keeper = reducer.keeper
    object.__setattr__(wrapped, "_horovod_sparse_keeper", keeper)
    state = CheckpointedState(keeper)
    object.__setattr__(wrapped, "horovod_sparse", state)
    # optimizers of the old kind do not find it by themselves
    wrapped._track_trackable(state, name="horovod_sparse", overwrite=True)

    cls = type(wrapped)
    base: Any = cls.__bases__[0]
    # where Keras looks for the class that a saved model names; in Horovod there is none of that name
    cls.__module__ = base.__module__
    for attribute in ("telemetry", "plan", "decision", "is_measured"):
        setattr(cls, attribute, property(partial(_of_synchronizer, attribute)))
    cls.replan = lambda self, plan=None, **more: _synchronizer(self).replan(plan, **more)
    cls.state_dict = lambda self: self._horovod_sparse_keeper.state_dict()
    cls.load_state_dict = lambda self, entry: self._horovod_sparse_keeper.load_state_dict(entry)
    cls.from_config = classmethod(lambda cls, config, **more: again(base.from_config(config, **more)))
    return wrapped


def _synchronizer(optimizer: Any) -> GradientSynchronizer:
    synchronizer: GradientSynchronizer = optimizer._allreduce_grads.reducer.synchronizer
    return synchronizer


def _of_synchronizer(attribute: str, optimizer: Any) -> Any:
    return getattr(_synchronizer(optimizer), attribute)


def _learning_rate(optimizer: Any) -> Any:
    """Of this step: a schedule is asked in the graph."""
    rate = optimizer.learning_rate
    if callable(rate) and not hasattr(rate, "dtype"):
        return rate(optimizer.iterations)
    return rate
