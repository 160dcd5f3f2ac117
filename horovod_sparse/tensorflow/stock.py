"""What `compression=` has to know of Horovod's own tapes and optimizers, and of their insides.

Horovod calls ``compression.compress(gradient)`` and tells it nothing else. What has to be known (which of
the gradients it is, the operation, the process set) stands in the calling frames. Everything here reads
names that Horovod 0.28.1 has, in one file.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import tensorflow as tf

from horovod_sparse.errors import UnsupportedError
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.planning import op_name

#: AutoGraph converts Horovod's functions where it traces them, and calls them so
_CONVERTED = "tf__"
#: frames that are looked at; AutoGraph puts several between one function and the next
_LIMIT = 60


@dataclass(frozen=True, eq=False)
class StockCall:
    """A call of `compress` by Horovod.

    Attributes:
        frame: of the function that synchronizes all gradients of a tape or optimizer.
        position: of the gradient among them.
        gradients: all of them.
        variables: theirs.
        process_set: the ranks that take part.
        optimizer: of Keras, where one has called.
        declared: what it does with the gradients, in words: ranks compare it.
    """

    frame: FrameType
    position: int
    gradients: Sequence[Any]
    variables: Sequence[Any] | None
    process_set: Any
    optimizer: Any = None
    declared: Mapping[str, object] = field(default_factory=dict)

    def name(self, position: int) -> str:
        """Of a variable, for messages."""
        variable = self.variables[position] if self.variables is not None else None
        return str(getattr(variable, "name", f"gradient{position}")).split(":")[0]

    def variable(self, position: int) -> Any:
        """A variable, where it is known by identity: a function's argument stands for any of its shape."""
        variable = self.variables[position] if self.variables is not None else None
        is_known = isinstance(getattr(variable, "handle", None), tf.__internal__.EagerTensor)
        return variable if is_known else None


def stock_call(tensor: tf.Tensor) -> StockCall:
    """Who calls `compress`, and what for.

    Raises:
        UnsupportedError: if it is not Horovod's tape or optimizer, or if it is Adasum.
    """
    inner: FrameType | None = None
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_LIMIT):
        if frame is None:
            break
        name = frame.f_code.co_name.removeprefix(_CONVERTED)
        if name in ("allreduce", "grouped_allreduce") and "process_set" in frame.f_locals:
            inner = frame
        if name == "allreduce_grads" and inner is not None:
            return _described(tensor, inner, frame)
        frame = frame.f_back
    raise UnsupportedError(
        "compress() was called by something else than the tapes and optimizers of horovod.tensorflow. A "
        "sparsifier keeps a residual for every variable, so it compresses nothing but their gradients: "
        "give hvd.allreduce() compression=Compression.none or .fp16"
    )


def refuse_adasum(op: Any) -> None:
    """Refuses Adasum.

    Raises:
        UnsupportedError: for it.
    """
    if op == hvd.Adasum:
        raise UnsupportedError(
            "op=Adasum cannot be combined with a sparsifier: it combines whole updates, and a residual has "
            "no place in that. Use op=Average or op=Sum, or compression=Compression.none"
        )


def _described(tensor: tf.Tensor, inner: FrameType, outer: FrameType) -> StockCall:
    refuse_adasum(inner.f_locals.get("op"))
    gradients = list(outer.f_locals["grads"])
    positions = [i for i, gradient in enumerate(gradients) if gradient is tensor]
    if not positions:
        raise UnsupportedError("the gradient that is compressed is none of those that are synchronized")
    variables = outer.f_locals.get("vars")
    process_set, optimizer = inner.f_locals["process_set"], _optimizer(outer)
    declared = {
        "engine": "horovod.tensorflow with a sparsifier",
        "op": op_name(inner.f_locals.get("op")),
        "prescale_factor": inner.f_locals.get("prescale_factor"),
        "postscale_factor": inner.f_locals.get("postscale_factor"),
    }
    return StockCall(outer, positions[0], gradients, variables, process_set, optimizer, declared)


def _optimizer(frame: FrameType | None) -> Any:
    """The Keras optimizer for which gradients are synchronized; None for a tape."""
    for _ in range(_LIMIT):
        if frame is None:
            break
        caller = frame.f_locals.get("self")
        if hasattr(caller, "_allreduce_grads") and hasattr(caller, "get_config"):
            return caller
        frame = frame.f_back
    return None


class _ByVariables:
    """A function of Horovod's for eager use, traced for each list of variables by itself.

    One trace would serve all variables of equal shapes, and give one's residual to another.

    Args:
        function: of gradients, variables, and whether names are generic.
    """

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
    """What the compressor in a key of Horovod's keeps, and the key without it."""
    arguments, eagerly = key
    for i, argument in enumerate(arguments):
        own = getattr(argument, "stock_functions", None)
        if own is not None:
            return own, (arguments[:i], arguments[i + 1 :], eagerly)
    return None, key


def keep_functions_with_compressors() -> None:
    """Makes compressors of ours free: Horovod keeps each one that it has seen for ever, as a key.

    What is kept beside the key refers to the compressor, so a dict with weak keys would not do.
    """
    function = hvd._make_cached_allreduce_grads_fn
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cell = cells.get("cache")
    if cell is not None and not isinstance(cell.cell_contents, _Functions):
        entries, cell.cell_contents = cell.cell_contents, _Functions()
        for key, value in entries.items():
            cell.cell_contents[key] = value
