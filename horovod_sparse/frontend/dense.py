"""The coroutine of a parameter that a plan leaves dense."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod_sparse.collectives import AllReduce, Synchronization
from horovod_sparse.errors import EditedGradientError, NonFiniteGradientError

#: mark of a rank that refuses the step; 1 is that of NaN or Inf
REFUSED = 2.0


def sum_densely(
    name: str, gradient: np.ndarray, carried: Any, place: tuple[int, int], *, refused: bool = False
) -> Synchronization[np.ndarray]:
    """The sum over ranks of all elements, by an allreduce.

    The ranks' health travels behind the elements, so that a NaN is met with the same error as in a
    bucket.

    Args:
        name: of the parameter.
        gradient: float32 or float64 [n]; read before the first request only.
        carried: [n], added to it, or 0: what error feedback still held.
        place: (rank, size) within the process set.
        refused: see `Bucket.step`.

    Returns:
        [n], of the gradient's type.

    Raises:
        NonFiniteGradientError: on every rank, if any rank's gradient is not finite.
        EditedGradientError: on every rank, if any rank refuses the step.
    """
    rank, size = place
    buffer = np.zeros(gradient.size + size, gradient.dtype)
    own = buffer[: gradient.size]
    np.add(gradient, carried, out=own)
    buffer[own.size + rank] = REFUSED if refused else not np.isfinite(own).all()
    count = own.size
    total: np.ndarray = yield AllReduce(buffer)
    check_health(name, total[count:])
    return total[:count]


def check_health(name: str, marks: np.ndarray) -> None:
    """Raises what a dense parameter's ranks have to say of themselves.

    Args:
        name: of the parameter.
        marks: [P]: 0 for a rank that is well, `REFUSED`, or another number for NaN or Inf.

    Raises:
        NonFiniteGradientError: if a rank's gradient is not finite.
        EditedGradientError: if a rank refuses the step.
    """
    if edited := np.flatnonzero(marks == REFUSED).tolist():
        raise EditedGradientError(name, dict.fromkeys(edited, "its own error says which"))
    if unhealthy := np.flatnonzero(marks).tolist():
        raise NonFiniteGradientError(name, dict.fromkeys(unhealthy, name))
