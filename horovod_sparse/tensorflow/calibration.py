"""Measuring a cluster through Horovod's TensorFlow operations, as a graph's requests are carried out."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from horovod_sparse.collectives import AllToAll, Exchange, Request, Synchronization
from horovod_sparse.errors import ArgumentError
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


def cycle_seconds() -> float:
    """Horovod's cycle time, as its environment variable sets it; 1 ms without one.

    Raises:
        ArgumentError: if the variable holds no number. (Horovod itself then takes 0.)
    """
    text = os.environ.get("HOROVOD_CYCLE_TIME", "1")
    try:
        return float(text) / 1e3
    except ValueError:
        raise ArgumentError("HOROVOD_CYCLE_TIME", text, "milliseconds") from None


def where_of(process_set: Any) -> Where:
    """This rank's place, and what a profile says of the cluster. Selection is on the host here."""
    return Where(
        rank=int(process_set.rank()),
        size=int(process_set.size()),
        framework="tensorflow",
        controller="mpi" if hvd.mpi_enabled() else "gloo",
        cycle_seconds=cycle_seconds(),
    )
