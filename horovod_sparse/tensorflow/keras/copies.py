"""Copies of a model that is compiled with a distributed optimizer."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from horovod_sparse.errors import UnsupportedError

__all__ = ["refuse_copies"]

#: frames that are looked at, from an optimizer's settings to the copy that asks for them
_LIMIT = 60


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
