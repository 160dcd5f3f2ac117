"""Measuring a cluster through Horovod's TensorFlow operations, as a graph's requests are carried out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.collectives import AllToAll, Exchange, Request, Synchronization
from horovod_sparse.frontend.calibration import Where
from horovod_sparse.frontend.engine import carry_out
from horovod_sparse.frontend.transport import over_hosts
from horovod_sparse.tensorflow import collectives
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.waiting import Watch
from horovod_sparse.topology import Topology

#: between two looks around of who waits
_LOOK_SECONDS = 0.1


def carry_out_together(
    coroutine: Synchronization[Any],
    process_set: Any,
    name: str,
    meanwhile: Callable[[], None] | None = None,
    topology: Topology | None = None,
) -> Any:
    """Runs a coroutine to its end; all ranks of the process set do so together, and nothing else meanwhile.

    Every request of a type has the same name, as a bucket's has in every step: so Horovod's response cache
    knows it. Operations run eagerly: what TensorFlow adds to each (about 0.1 ms) is part of the result.

    Args:
        coroutine: yields requests.
        process_set: the ranks.
        name: of the collectives.
        meanwhile: called again and again while this rank waits; may raise, where it finds that others will
            not come.
        topology: which ranks of the process set share a host, where requests are of single levels.
    """
    if topology is not None:
        coroutine = over_hosts(coroutine, topology, int(process_set.rank()))
    place = int(process_set.rank()), int(process_set.size())

    def execute(request: Request) -> Any:
        kind = type(request)
        if place[1] == 1:
            return _alone(request)
        value_dtype = getattr(request, "buffer", np.empty(0, np.float32)).dtype
        buffer, splits = collectives.to_wire(request, value_dtype, place)
        given = splits if kind in (Exchange, AllToAll) else None
        run = partial(collectives.carry_out, kind, buffer, given, f"{name}.{kind.__name__}", process_set)
        output, received = run() if meanwhile is None else _watched(run, meanwhile)
        return collectives.from_wire(request, output.numpy(), received.numpy())

    with Watch(None, process_set).together(name):
        return carry_out(coroutine, execute)


def _watched(run: Callable[[], Any], meanwhile: Callable[[], None]) -> Any:
    """What a function gives that waits within TensorFlow, in a thread: this one looks around meanwhile."""
    given: list[Any] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with tf.device("/cpu:0"):
                given.append(run())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work, name="horovod_sparse.agreement", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK_SECONDS)
        meanwhile()
    if failed:
        raise failed[0]
    return given[0]


def _alone(request: Request) -> Any:
    """What a single rank gets back."""
    if isinstance(request, Exchange):
        return {peer: request.sends[peer].copy() for peer in request.sources}
    if isinstance(request, AllToAll):
        return [buffer.copy() for buffer in request.buffers]
    return request.buffer.copy()


def where_of(process_set: Any) -> Where:
    """This rank's place, and what a profile says of the cluster. Selection is on the host here."""
    return Where.of(process_set, "tensorflow", hvd)
