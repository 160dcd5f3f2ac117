"""Values of `compression=`: sparsifiers and Horovod's own choices; and `allreduce` of tensors by them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import Recipe
from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.tensors.gradients import gradient_memory
from horovod_sparse.tensors.layout import dtype_name
from horovod_sparse.torch._horovod import hvd, present_start
from horovod_sparse.torch.driver import HorovodDriver, construction_errors, raise_explained
from horovod_sparse.training import compression as common
from horovod_sparse.training.agreement import compared
from horovod_sparse.training.engine import Task


class SparseCompressor(hvd.compression.Compressor):
    """A recipe. Made by `Compression.topk(...)` and the like.

    One compressor may serve several optimizers.

    Stock ``horovod.torch.DistributedOptimizer(optimizer, named_parameters=..., compression=...)`` is adopted
    where it would begin to synchronize gradients: it becomes what our `DistributedOptimizer` gives with
    ``merging="layerwise", tensor_selection="all"``, so every parameter is a bucket of its own, and density
    applies to each for itself. Horovod's `groups` have no use then. With one rank Horovod synchronizes
    nothing, and the optimizer stays Horovod's: gradients stay as they are, so it trains without the momentum
    that momentum correction was to apply. ``horovod_sparse.torch.DistributedOptimizer`` does with one rank
    what it does with many.

    Args:
        recipe: sparsifier and feedback.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._num_compressed = 0

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns the tensor with 0 for all elements that are not selected; Horovod sends all of them.

        Called by ``horovod.torch.allreduce(tensor, compression=...)``, for example. No residual is kept.
        `horovod_sparse.torch.allreduce` sends only selected elements.
        Integers, COO tensors, and tensors with a NaN or Inf stay as they are.

        Raises:
            UnsupportedError: if the tensor requires a gradient.

        Example:
            >>> Compression.topk(density=0.5).compress(torch.tensor([1.0, -4.0]))
            (tensor([ 0., -4.]), None)
        """
        if not is_sparsifiable(tensor):
            return tensor, None
        self._num_compressed += 1  # random numbers go by it
        common.refuse_gradients(tensor.requires_grad and torch.is_grad_enabled())
        if tensor.numel() == 0:
            return tensor, None
        total, lone = lone_tensor(tensor, self.recipe, f"compressed.{self._num_compressed}", (0, 1))
        return total if lone.write_alone() else tensor, None

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Returns the tensor."""
        return tensor

    def __repr__(self) -> str:
        return f"Compression.parse({self.recipe.describe()!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (SparseCompressor, (self.recipe,))


def is_sparsifiable(tensor: Any) -> bool:
    """True for a dense tensor of a type that sparsifiers take."""
    return dtype_name(tensor) is not None and tensor.layout == torch.strided


def lone_tensor(
    tensor: torch.Tensor, recipe: Recipe, name: str, place: tuple[int, int]
) -> tuple[torch.Tensor, common.LoneTensor]:
    """Returns a tensor for the sum of another one, and what sums that."""
    given = tensor.detach().contiguous()
    total, memory = torch.empty_like(given), gradient_memory(tensor.device, name)
    info = BucketInfo(name, tensor.numel(), *place, dtype_name(tensor) or "unknown")
    return total, common.LoneTensor(recipe, info, memory, given.view(-1), total.view(-1))


_COMMON_ARGUMENTS = """
Arguments that every algorithm takes:
    density: kept fraction in (0, 1], of each rank's elements or of the union of all ranks.
    feedback: "error" (default: what is not sent is kept for the next step), "momentum" (momentum
        correction; the optimizer must have none then), "none", or a feedback with arguments, as
        "momentum(momentum=0.9,clip_norm=1.0)".
    dense_below: parameters of fewer elements are sent whole, by an allreduce.
    dense: patterns of names ("*.bias") whose parameters are sent whole.
    densities: densities of parameters by pattern ({"embedding.*": 0.01}).

Returns:
    A SparseCompressor for the argument compression= of horovod.torch.DistributedOptimizer or
    horovod_sparse.torch.DistributedOptimizer.
"""


def __getattr__(name: str) -> Any:
    """Horovod's names of the module that this one stands for: `Compressor`, `FP16Compressor`, ..."""
    return getattr(hvd.compression, name)


class Compression(
    metaclass=common.Algorithms,
    make=SparseCompressor,
    help_text=_COMMON_ARGUMENTS,
    telling=construction_errors.telling,
):
    """The choices for the argument `compression=`; a superset of `horovod.torch.Compression`.

    ``Compression.topk(density=0.01)``, and likewise for every algorithm: ``help(Compression.exdyna)``
    lists arguments. ``Compression.none`` and ``Compression.fp16`` are Horovod's own.

    Example:
        >>> Compression.parse("exdyna:density=0.001"), Compression.parse("none") is Compression.none
        (Compression.parse('exdyna:density=0.001'), True)
        >>> Compression.topk(densty=0.01)
        Traceback (most recent call last):
        horovod_sparse.errors.UnknownNameError: unknown argument of topk 'densty': the known ones are \
dense, dense_below, densities, density, feedback, indices, quantum, schedule, values
    """

    none = hvd.Compression.none
    fp16 = hvd.Compression.fp16


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
    name = name or common.call_name(present_start(), process_set)
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
    """Waits for a handle's operation, and returns its result; takes Horovod's handles, too."""
    if not isinstance(handle, SparseHandle):
        return hvd.synchronize(handle)
    try:
        handle.driver.wait([handle.task])
    except hvd.HorovodInternalError as error:
        raise_explained(error)
        raise
    handle.task.value()
    return handle.total
