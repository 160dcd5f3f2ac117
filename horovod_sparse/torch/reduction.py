"""`allreduce` of PyTorch tensors that sends sparsely: Horovod's, with a sparsifier as compression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from horovod_sparse.errors import ArgumentError
from horovod_sparse.torch._horovod import hvd, present_start
from horovod_sparse.torch.compression import Compression, SparseCompressor, is_sparsifiable, lone_tensor
from horovod_sparse.torch.driver import HorovodDriver, explain
from horovod_sparse.training import allreduce as common
from horovod_sparse.training.agreement import compared
from horovod_sparse.training.engine import Task

_call_names = common.CallNames()


@dataclass(eq=False)
class SparseHandle:
    """An allreduce in progress: see `poll` and `synchronize`."""

    driver: HorovodDriver
    task: Task
    total: torch.Tensor


def _driver_of(process_set: Any) -> HorovodDriver:
    """Returns the driver of a process set, which lives as long as the set."""
    if not hasattr(process_set, "_horovod_sparse_sums"):
        process_set._horovod_sparse_sums = HorovodDriver(process_set)
        process_set._horovod_sparse_sums.label = "horovod_sparse.allreduce."
    driver: HorovodDriver = process_set._horovod_sparse_sums
    return driver


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = hvd.global_process_set,
    *,
    compression: Any = Compression.none,
) -> Any:
    """Starts an `allreduce`, and returns a handle for `poll` and `synchronize`.

    Arguments are those of ``horovod.torch.allreduce_async``, and `compression`: a sparsifier, or none. The
    tensor may be changed once this has returned, if a sparsifier is given.
    """
    if isinstance(compression, str):
        compression = Compression.parse(compression)
    sparsifies = isinstance(compression, SparseCompressor)
    if not sparsifies and compression is not Compression.none:
        raise ArgumentError("compression", compression, "a sparsifier or Compression.none; or use allreduce")
    if not sparsifies:
        return hvd.allreduce_async(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    # Horovod counts handles, of which a rank outside of a process set has fewer
    name = name or _call_names.next(present_start(), process_set)
    if not is_sparsifiable(tensor):
        return hvd.allreduce_async(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    common.refuse_gradients(tensor.requires_grad and torch.is_grad_enabled())
    given = compression.recipe, op, average, prescale_factor, postscale_factor, process_set
    scale, facts_of = common.terms(hvd, *given)
    facts = facts_of(tensor.shape, str(tensor.dtype))
    driver = _driver_of(process_set)
    if prescale_factor != 1.0:
        tensor = tensor * prescale_factor
    if tensor.numel() == 0:
        return SparseHandle(driver, driver.start(name, compared(facts)), tensor.clone())
    place = int(process_set.rank()), int(process_set.size())
    total, lone = lone_tensor(tensor, compression.recipe, name, place)
    return SparseHandle(driver, driver.start(name, lone.summed(facts, scale)), total)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = hvd.global_process_set,
) -> torch.Tensor:
    """Sums or averages a tensor over ranks, of which each sends what a sparsifier selects.

    With C(x) for what a sparsifier makes of x, and P ranks::

        sum = postscale * (C(prescale x_0) + ... + C(prescale x_{P-1}))       (Average: divided by P)

    Nothing is kept: what is not sent is lost. Sums are taken in float32, or float64 for float64. Arguments
    and order are those of ``horovod.torch.allreduce``. With a compression that is no sparsifier, and for
    integers, it is that function; ranks compare what they give with one small message before.

    Args:
        tensor: of the same shape and dtype on all ranks.
        average: see Horovod.
        name: the same on all ranks; without one, calls are counted, so all ranks call in the same order.
            Rules by name of a sparsifier, and random numbers, go by it.
        compression: a sparsifier, text for `Compression.parse`, or one of Horovod's compressors. Of a
            sparsifier's feedback nothing is used, and of its schedule the first step.
        op: Average (default) or Sum.
        prescale_factor: factor of the tensor, before elements are selected.
        postscale_factor: factor of the sum.
        process_set: the ranks that take part.

    Returns:
        A tensor of the shape and dtype of `tensor`, the same on all ranks.

    Raises:
        ArgumentError: for another op, or a process set without this rank.
        UnsupportedError: for op=Adasum, a tensor that requires a gradient, or a name that is in use.
        StateMismatchError: on all ranks, if they do not give the same shape, dtype or arguments.
        NonFiniteGradientError: on all ranks, if a NaN or Inf is in one rank's tensor, or in the sum.

    Example:
        >>> import horovod_sparse.torch as hvd; hvd.init()
        >>> hvd.allreduce(torch.tensor([1.0, -4.0, 2.0]), compression=hvd.Compression.topk(density=0.4))
        tensor([ 0., -4.,  0.])
    """
    if isinstance(compression, str):
        compression = Compression.parse(compression)
    if isinstance(compression, SparseCompressor):
        factors = prescale_factor, postscale_factor
        total: torch.Tensor = synchronize(
            allreduce_async(tensor, average, name, op, *factors, process_set, compression=compression)
        )
        return total
    reduced: torch.Tensor = hvd.allreduce(
        tensor, average, name, compression, op, prescale_factor, postscale_factor, process_set
    )
    return reduced


def poll(handle: Any) -> bool:
    """Returns True if `synchronize` has nothing to wait for; takes handles of Horovod's, too."""
    if not isinstance(handle, SparseHandle):
        return bool(hvd.poll(handle))
    handle.driver.advance()
    return handle.task.done


def synchronize(handle: Any) -> Any:
    """Waits for what a handle stands for, and returns its result; takes handles of Horovod's, too."""
    if not isinstance(handle, SparseHandle):
        return hvd.synchronize(handle)
    try:
        handle.driver.wait([handle.task])
    except hvd.HorovodInternalError as error:
        explain(error)
        raise
    handle.task.value()
    return handle.total
