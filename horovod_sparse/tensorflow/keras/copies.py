"""Copies of distributed optimizers, and of models that are compiled with one."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from horovod_sparse.errors import UnsupportedError
from horovod_sparse.tensorflow.arguments import Arguments
from horovod_sparse.tensorflow.compression import SparseCompressor

#: frames that are looked at, from an optimizer's settings to the copy that asks for them
_LIMIT = 60


class Again:
    """Wraps another optimizer in the same way; it may not share the residuals of the first.

    Args:
        wrap: `DistributedOptimizer`.
        arguments: of it.
    """

    def __init__(self, wrap: Callable[..., Any], arguments: Arguments) -> None:
        self._wrap, self._arguments = wrap, arguments

    def __call__(self, other: Any) -> Any:
        """The other, wrapped."""
        arguments, compression = self._arguments, self._arguments.compression
        if isinstance(compression, SparseCompressor):
            own = SparseCompressor(compression.recipe, compression.process_set)
            arguments = dataclasses.replace(arguments, compression=own)
        return self._wrap(other, **arguments.taken_by(self._wrap))


def made_again(again: Again, base: Any, config: dict[str, Any]) -> Any:
    """As Keras copies and pickles optimizers: settings, and no state."""
    return again(base.from_config(config))


def refuse_copies(*makers: Any) -> None:
    """Refuses to be asked for an optimizer's settings by what copies or pickles a model.

    Keras does both by writing a file and loading it, in which a distributed optimizer is an ordinary one, so
    that it can be loaded where there is no Horovod: the copy would train on each rank alone.

    Args:
        makers: the methods of Keras that copy.

    Raises:
        UnsupportedError: if one of them has called.

    Example:
        >>> class Model:
        ...     def __deepcopy__(self, memo):
        ...         refuse_copies(Model.__deepcopy__)
        >>> refuse_copies(Model.__deepcopy__)
        >>> Model().__deepcopy__({})
        Traceback (most recent call last):
        horovod_sparse.errors.UnsupportedError: a copy of this model, or a pickled one, would not be...
    """
    codes = {maker.__code__ for maker in makers}
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_LIMIT):
        if frame is None:
            return
        if frame.f_code in codes:
            raise UnsupportedError(
                "a copy of this model, or a pickled one, would not be distributed: copy it with "
                "keras.models.clone_model and set_weights, and compile the copy with a "
                "DistributedOptimizer(...) of its own; or save it, and use hvd.load_model"
            )
        frame = frame.f_back
