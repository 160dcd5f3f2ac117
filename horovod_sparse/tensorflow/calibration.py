"""Measuring a cluster through Horovod's TensorFlow operations, as a graph's requests are carried out."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod_sparse.collectives import AllToAll, Exchange, Request, Synchronization
from horovod_sparse.frontend.calibration import Where
from horovod_sparse.frontend.engine import carry_out
from horovod_sparse.tensorflow import collectives
from horovod_sparse.tensorflow._horovod import hvd


def carry_out_together(coroutine: Synchronization[Any], process_set: Any, name: str) -> Any:
    """Runs a coroutine to its end; all ranks of the process set do so together, and nothing else meanwhile.

    Every request of a type has the same name, as a bucket's has in every step: so Horovod's response cache
    knows it. Operations run eagerly: what TensorFlow adds to each (about 0.1 ms) is part of the result.

    Args:
        coroutine: yields requests.
        process_set: the ranks.
        name: of the collectives.
    """
    place = int(process_set.rank()), int(process_set.size())

    def execute(request: Request) -> Any:
        kind = type(request)
        if place[1] == 1:
            return _alone(request)
        value_dtype = getattr(request, "buffer", np.empty(0, np.float32)).dtype
        buffer, splits = collectives.to_wire(request, value_dtype, place)
        given = splits if kind in (Exchange, AllToAll) else None
        output, received = collectives.carry_out(kind, buffer, given, f"{name}.{kind.__name__}", process_set)
        return collectives.from_wire(request, output.numpy(), received.numpy())

    return carry_out(coroutine, execute)


def _alone(request: Request) -> Any:
    """What a single rank gets back."""
    if isinstance(request, Exchange):
        return {peer: request.sends[peer].copy() for peer in request.sources}
    if isinstance(request, AllToAll):
        return [buffer.copy() for buffer in request.buffers]
    return request.buffer.copy()


def where_of(process_set: Any) -> Where:
    """This rank's place, and what a profile says of the cluster. Selection is on the host here."""
    return Where.of(process_set, "tensorflow", hvd.mpi_enabled())
