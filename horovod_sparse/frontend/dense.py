"""The coroutine of a parameter that a plan leaves dense."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod_sparse.collectives import AllReduce, Synchronization
from horovod_sparse.errors import NonFiniteGradientError

__all__ = ["sum_densely"]


def sum_densely(
    name: str, gradient: np.ndarray, carried: Any, place: tuple[int, int]
) -> Synchronization[np.ndarray]:
    """The sum over ranks of all elements, by an allreduce.

    The ranks' health travels behind the elements, so that a NaN is met with the same error as in a
    bucket.

    Args:
        name: of the parameter.
        gradient: float32 or float64 [n]; read before the first request only.
        carried: [n], added to it, or 0: what error feedback still held.
        place: (rank, size) within the process set.

    Returns:
        [n], of the gradient's type.

    Raises:
        NonFiniteGradientError: on every rank, if any rank's gradient is not finite.
    """
    rank, size = place
    buffer = np.zeros(gradient.size + size, gradient.dtype)
    own = buffer[: gradient.size]
    np.add(gradient, carried, out=own)
    buffer[own.size + rank] = not np.isfinite(own).all()
    count = own.size
    total: np.ndarray = yield AllReduce(buffer)
    if unhealthy := np.flatnonzero(total[count:]).tolist():
        raise NonFiniteGradientError(name, dict.fromkeys(unhealthy, name))
    return total[:count]
