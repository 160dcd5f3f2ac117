"""What is read out of Horovod, TensorFlow and Keras that they do not promise: where one changes, look here.

Horovod calls ``compression.compress(gradient)`` and tells it nothing else: which of the gradients it is, the
operation and the process set are local variables of the calling functions. Needed are, of

* Horovod 0.28.1: functions `allreduce_grads` (`grads`, `vars`) and `allreduce` or `grouped_allreduce` (`op`,
  `process_set`, `prescale_factor`, `postscale_factor`) with these local variables,
  `_make_cached_allreduce_grads_fn` with its `cache`, `mpi_ops._basics.init` (in `_horovod.py`), and of its
  Keras optimizers `_allreduce_grads` and `_agg_helper` (in `keras/keras2.py`);
* TensorFlow: a graph's `outer_graph`, `experimental_acd_manager` and `_control_dependencies_stack` (in
  `graph.py`);
* tf-keras: `_is_wrapped_by_loss_scale_optimizer`, which a LossScaleOptimizer sets on the optimizer that it
  keeps as `_optimizer`; its `_loss_scale`; `_create_all_weights`, `_initial_epoch`, `_training_state`;
* Keras 3: `KerasSaveable` and `_trainable_variables`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import tensorflow as tf

from horovod_sparse.errors import UnsupportedError
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.collectives import op_name

#: the engine where they do the reduction, in words
STOCK = "horovod.tensorflow with a sparsifier"
#: AutoGraph converts Horovod's functions where it traces them, and calls them so
_CONVERTED = "tf__"
#: frames that are looked at; AutoGraph puts several between one function and the next
_LIMIT = 60


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields a frame and its nearest callers."""
    for _ in range(_LIMIT):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


@dataclass(frozen=True, eq=False)
class StockCall:
    #: of the function that synchronizes all gradients of a tape or optimizer
    frame: FrameType
    gradients: Sequence[Any]
    variables: Sequence[Any] | None
    process_set: Any
    #: what it does with the gradients: the average, not the sum, and times what
    averages: bool
    scale: float
    #: the same in words, which ranks compare
    declared: Mapping[str, object]
    #: of Keras, where one has called
    optimizer: Any = None

    def name(self, position: int) -> str:
        variable = self.variables[position] if self.variables is not None else None
        return str(getattr(variable, "name", f"gradient{position}")).split(":")[0]

    def variable(self, position: int) -> Any:
        """Returns a variable that is known by identity: a function's argument stands for any of its shape."""
        variable = self.variables[position] if self.variables is not None else None
        is_known = isinstance(getattr(variable, "handle", None), tf.__internal__.EagerTensor)
        return variable if is_known else None


def stock_call(tensor: tf.Tensor) -> StockCall | None:
    """Returns the tape or optimizer that calls `compress`, and what for; None for another caller."""
    inner: FrameType | None = None
    for frame in _frames(sys._getframe(1)):
        name = frame.f_code.co_name.removeprefix(_CONVERTED)
        if name in ("allreduce", "grouped_allreduce") and "process_set" in frame.f_locals:
            inner = frame
        if name == "allreduce_grads" and inner is not None:
            return _described(tensor, inner, frame)
    return None


def refuse_adasum(op: Any) -> None:
    if op == hvd.Adasum:
        raise UnsupportedError(
            "op=Adasum cannot be combined with a sparsifier: it combines whole updates, and a residual has "
            "no place in that. Use op=Average or op=Sum, or compression=Compression.none"
        )


def _described(tensor: tf.Tensor, inner: FrameType, outer: FrameType) -> StockCall:
    refuse_adasum(inner.f_locals.get("op"))
    gradients = list(outer.f_locals["grads"])
    if not any(gradient is tensor for gradient in gradients):
        raise UnsupportedError("the gradient that is compressed is none of those that are synchronized")
    variables = outer.f_locals.get("vars")
    process_set, optimizer = inner.f_locals["process_set"], _optimizer(outer)
    op, before, after = (inner.f_locals[name] for name in ("op", "prescale_factor", "postscale_factor"))
    declared = {"op": op_name(op), "prescale_factor": before, "postscale_factor": after}
    return StockCall(
        outer, gradients, variables, process_set, op == hvd.Average, before * after, declared, optimizer
    )


def _optimizer(frame: FrameType) -> Any:
    """Returns the Keras optimizer for which gradients are synchronized; None for a tape."""
    callers = (caller.f_locals.get("self") for caller in _frames(frame))
    return next(
        (one for one in callers if hasattr(one, "_allreduce_grads") and hasattr(one, "get_config")), None
    )


def scaler_of(optimizer: Any) -> Any:
    """Returns the LossScaleOptimizer of tf-keras that is taking the optimizer now."""
    for frame in itertools.islice(_frames(sys._getframe(1)), 10):
        caller = frame.f_locals.get("self")
        inner = getattr(caller, "__dict__", {}).get("_optimizer")
        if inner is not None and inner is optimizer:
            return caller
    raise UnsupportedError("what scales the loss was not found: this version of tf-keras is not supported")


def refuse_copies(*makers: Any) -> None:
    """Refuses methods of Keras that copy a model through a file: the copy would train on each rank alone."""
    codes = {maker.__code__ for maker in makers}
    if any(frame.f_code in codes for frame in _frames(sys._getframe(1))):
        raise UnsupportedError(
            "a copy of this model, or a pickled one, would not be distributed: copy it with "
            "keras.models.clone_model and set_weights, and compile the copy with a "
            "DistributedOptimizer(...) of its own; or save it, and use hvd.load_model"
        )


class _ByVariables:
    """A function of Horovod's for eager use, traced for each list of variables: shapes may be equal."""

    def __init__(self, function: Any) -> None:
        self._function, self._own = function, dict[Any, Any]()

    def __call__(self, grads: Any, vars: Any = None, *more: Any, **named: Any) -> Any:
        key = tuple(variable.ref() for variable in vars or () if hasattr(variable, "ref"))
        if key not in self._own:
            self._own[key] = tf.function(self._function.python_function)
        return self._own[key](grads, vars, *more, **named)


class _Functions(dict[Any, Any]):
    """Horovod's cache of functions, by their arguments: a compressor of ours keeps its own."""

    def __contains__(self, key: Any) -> bool:
        own, rest = _of_compressor(key)
        return super().__contains__(key) if own is None else rest in own

    def __getitem__(self, key: Any) -> Any:
        own, rest = _of_compressor(key)
        return super().__getitem__(key) if own is None else own[rest]

    def __setitem__(self, key: Any, value: Any) -> None:
        own, rest = _of_compressor(key)
        if own is None:
            super().__setitem__(key, value)
        else:
            own[rest] = _ByVariables(value) if hasattr(value, "python_function") else value


def _of_compressor(key: Any) -> tuple[dict[Any, Any] | None, Any]:
    """Returns what the compressor in a key of Horovod's keeps, and the key without it."""
    arguments, eagerly = key
    for i, argument in enumerate(arguments):
        own = getattr(argument, "stock_functions", None)
        if own is not None:
            return own, (arguments[:i], arguments[i + 1 :], eagerly)
    return None, key


def keep_functions_with_compressors() -> None:
    """Makes compressors of ours free: Horovod keeps each one that it has seen for ever, as a key."""
    function = hvd._make_cached_allreduce_grads_fn
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cell = cells.get("cache")
    if cell is not None and not isinstance(cell.cell_contents, _Functions):
        entries, cell.cell_contents = cell.cell_contents, _Functions()
        for key, value in entries.items():
            cell.cell_contents[key] = value
