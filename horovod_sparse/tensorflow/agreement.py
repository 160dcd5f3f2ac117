"""What ranks agree upon, carried out eagerly by Horovod's operations, also while a function is traced."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.carriers.exchanges import over_hosts
from horovod_sparse.collectives import AllToAll, Exchange, Request, Synchronization
from horovod_sparse.tensorflow import collectives
from horovod_sparse.tensorflow._horovod import hvd, is_elastic, takes_part
from horovod_sparse.tensorflow.waiting import Watch
from horovod_sparse.topology import Topology
from horovod_sparse.training.agreement import compared, declaration, next_label
from horovod_sparse.training.collective_errors import ConstructionErrors
from horovod_sparse.training.engine import carry_out

#: of optimizers, tapes and compressors
construction_errors = ConstructionErrors.of_horovod(hvd)

#: between two looks around of who waits
_LOOK_SECONDS = 0.1


def carry_out_together(
    coroutine: Synchronization[Any],
    process_set: Any,
    name: str,
    topology: Topology | None = None,
    *,
    looks: bool = False,
) -> Any:
    """Runs a coroutine to its end; all ranks of the process set do so together, and nothing else meanwhile.

    Every request of a type has the same name, as a bucket's has in every step: so Horovod's response cache
    knows it. With `looks`, ranks that cannot make their optimizer are looked for while this one waits.
    """
    place = int(process_set.rank()), int(process_set.size())
    if topology is not None:
        coroutine = over_hosts(coroutine, topology, place[0])
    look = construction_errors.looking(process_set) if looks else None

    def execute(request: Request) -> Any:
        kind = type(request)
        if place[1] == 1:
            return _alone(request)
        value_dtype = getattr(request, "buffer", np.empty(0, np.float32)).dtype
        buffer, splits = collectives.to_wire(request, value_dtype, place)
        given = splits if kind in (Exchange, AllToAll) else None
        run = partial(collectives.carry_out, kind, buffer, given, f"{name}.{kind.__name__}", process_set)
        output, received = run() if look is None else _watched(run, look)
        return collectives.from_wire(request, output.numpy(), received.numpy())

    # out of a graph that is being traced; a host function's thread has none
    with tf.init_scope(), tf.device("/cpu:0"), Watch(None, process_set).together(name):
        return carry_out(coroutine, execute)


def _watched(run: Callable[[], Any], look: Callable[[], None]) -> Any:
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
        look()
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


def together(coroutine: Synchronization[Any], process_set: Any) -> Any:
    """What a coroutine returns that all ranks run when they see gradients first.

    In elastic training, where a worker that joins traces while the others go on, and with one rank, this
    rank runs it alone. The collectives have the same names whatever they are about: a rank that is about
    something else is an error then, where it would wait for ever otherwise.
    """
    if process_set.size() == 1 or is_elastic():
        return carry_out(coroutine, lambda request: request.buffer)  # type: ignore[union-attr]
    name = f"horovod_sparse.{process_set.process_set_id}.plan"
    return carry_out_together(coroutine, process_set, name, looks=True)


def compare_densely(compression: Any, process_set: Any, **arguments: object) -> None:
    """Ranks that send whole gradients compare their arguments with the first ones: some rank may sparsify."""
    if not takes_part(process_set):
        return
    name = str(getattr(compression, "__name__", type(compression).__name__))
    name = {"NoneCompressor": "none", "FP16Compressor": "fp16"}.get(name, name)
    given = declaration(name, "horovod.tensorflow", process_set=ranks_of(process_set), **arguments)
    together(compared(given), process_set)


def ranks_of(process_set: Any) -> str:
    """A process set, in words that are the same on all of its ranks."""
    return "all" if process_set is hvd.global_process_set else str(list(process_set.ranks))


def op_name(op: Any) -> str:
    """Of one of Horovod's reductions."""
    return {hvd.Average: "Average", hvd.Sum: "Sum", hvd.Adasum: "Adasum"}.get(op, str(op))


def label_of(prefix: str, process_set: Any, variables: Sequence[Any]) -> str:
    """A name for collectives about these variables, taken when the first of them is due: see `next_label`."""
    model = [(variable.shape, tf.as_dtype(variable.dtype).name) for variable in variables]
    return next_label(f"{prefix}.{process_set.process_set_id}", model)
