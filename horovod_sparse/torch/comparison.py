"""Ranks that were given different things find it out together, sparsifying or not."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import torch

from horovod_sparse.collectives import Synchronization
from horovod_sparse.errors import StateMismatchError
from horovod_sparse.topology import Topology
from horovod_sparse.torch._horovod import hvd, present_start
from horovod_sparse.torch.driver import carry_out_together
from horovod_sparse.training.agreement import compared, declaration
from horovod_sparse.training.collective_errors import ConstructionErrors
from horovod_sparse.training.settings import Settings

#: how long ranks that have waited in vain may differ in when they stopped
_ANSWER_SECONDS = 5.0

#: of optimizers and compressors
construction_errors = ConstructionErrors.of_horovod(hvd)


def arguments_of(optimizer: Any) -> dict[str, object]:
    """What of Horovod's own arguments, of its optimizer or ours, has to be equal on all ranks."""
    ranks = optimizer.process_set.ranks
    return {
        "op": {hvd.Average: "Average", hvd.Sum: "Sum"}.get(optimizer.op, "Adasum"),
        "gradient_predivide_factor": float(optimizer.gradient_predivide_factor),
        "backward_passes_per_step": optimizer.backward_passes_per_step,
        "sparse_as_dense": bool(optimizer.sparse_as_dense),
        "process_set": "all" if ranks is None else list(ranks),
    }


def compare_with_ranks(
    coroutine: Synchronization[Any],
    process_set: Any,
    deadline_seconds: float | None = None,
    topology: Topology | None = None,
) -> Any:
    """Runs what ranks begin with, under one name whatever they go on with: see `compared`."""
    return carry_out_together(
        *(coroutine, process_set, "horovod_sparse.agreement"),
        deadline_seconds=deadline_seconds,
        meanwhile=construction_errors.looking(process_set),
        topology=topology,
    )


def refuse_whole_gradients(names: Sequence[str], process_set: Any) -> None:
    """After ranks have been waited for in vain: finds out whether one sends whole gradients, and ends that.

    It waits for collectives of the parameters' names. Putting another type under such a name is an error of
    Horovod's on all ranks. Nothing goes on afterwards in any case, so it does not matter if nobody answers.
    """
    other = torch.float64
    handles = [
        hvd.allreduce_async(torch.zeros(1, dtype=other), name=name, process_set=process_set) for name in names
    ]
    until = time.monotonic() + _ANSWER_SECONDS
    while not all(map(hvd.poll, handles)) and time.monotonic() < until:
        time.sleep(0.01)
    for handle in handles:
        try:
            if hvd.poll(handle):
                hvd.synchronize(handle)
        except hvd.HorovodInternalError as error:
            if "mismatched" in str(error).lower():
                raise StateMismatchError(
                    f"compression differs: another rank sends whole gradients ({error}); give all ranks the "
                    "same"
                ) from error


def compare_dense(optimizer: Any, compression: object) -> None:
    """Has an optimizer of whole gradients compare its arguments with other ranks, once per start."""
    synchronize = type(optimizer).synchronize
    name = str(getattr(compression, "__name__", type(compression).__name__))
    name = {"NoneCompressor": "none", "FP16Compressor": "fp16"}.get(name, name)
    under: list[Any] = [None]

    def meet() -> None:
        start = present_start()
        if under[0] is start or not optimizer.process_set.included() or optimizer.process_set.size() == 1:
            return
        try:
            given = {**arguments_of(optimizer), **Settings().describe()}
            compare_with_ranks(compared(declaration(name, "horovod.torch", **given)), optimizer.process_set)
        except hvd.HorovodInternalError as error:
            if "join" not in str(error).lower():  # a rank without batches has nothing that could differ
                raise
        under[0] = start

    @functools.wraps(synchronize)
    def met(self: Any) -> None:
        meet()
        synchronize(self)

    type(optimizer).synchronize = met
