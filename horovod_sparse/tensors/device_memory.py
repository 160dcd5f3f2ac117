"""Gradients on a device (not in host memory), and their accumulators. Loaded with the first of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_sparse.arrays import FoldReport, FoldRule, WholeGradient
from horovod_sparse.arrays.whole import DIGIT_BITS, HEALTH_NUMBERS, positions_by_rank
from horovod_sparse.errors import MessageError
from horovod_sparse.feedback import Recipe
from horovod_sparse.kernels.host.scatter import checked
from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.tensors.accumulator import TorchAccumulator, fold_dtype, kernels_for
from horovod_sparse.tensors.gradients import GradientMemory
from horovod_sparse.tensors.layout import unscaled
from horovod_sparse.tensors.streams import CudaStreams, to_device, to_host


@functools.cache
def device_memory(device: torch.device) -> DeviceMemory:
    """Returns the `DeviceMemory` of a device; raises if it lacks float64 or copies to the host."""
    torch.zeros(1, dtype=torch.float64, device=device).sqrt().cpu()
    return DeviceMemory(device)


class DeviceMemory(GradientMemory):
    summing: ClassVar[Mapping[str, Any]] = {
        "summable": lambda gradient, whole: gradient.to(fold_dtype(whole.dtype)).reshape(-1),
        "pad": lambda shard, count: torch.cat([shard, shard.new_zeros(count - shard.numel())]),
    }

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def accumulator(self, info: BucketInfo, recipe: Recipe, *, whole: bool = False) -> Any:
        if whole:
            return WholeTensor(info.num_elements, info.dtype)
        density, companions = recipe.sparsifier.density, recipe.feedback.num_companions
        kept = {"density": density, "companions": companions, "device": self._device}
        return TorchAccumulator(info.num_elements, info.dtype, **kept)

    def streams(self) -> CudaStreams | None:
        return CudaStreams(self._device) if self._device.type == "cuda" else None

    def fold_input(self, gradients: Sequence[torch.Tensor], loss_scale: float = 1.0) -> torch.Tensor:
        own = gradients[0] if len(gradients) == 1 else torch.cat(list(gradients))
        return unscaled(own, loss_scale)

    def write(
        self,
        gradients: Sequence[torch.Tensor],
        spans: Sequence[tuple[int, int]],
        indices: np.ndarray | None,
        values: Any,
        scale: float,
    ) -> int:
        first, num_elements = gradients[0], spans[-1][1]
        own = first if len(gradients) == 1 else first.new_empty(num_elements)
        if indices is not None:
            own.zero_()
        num_union = apply_scaled_sum(own, indices, values, scale)
        if own is not first:
            torch._foreach_copy_(list(gradients), list(own.split([stop - start for start, stop in spans])))
        return num_union


class WholeTensor(WholeGradient):
    """A `WholeGradient` on a device, for `Dense`: the allreduce takes a device tensor, and returns one."""

    def fold(self, gradient: Any, rule: FoldRule | None = None) -> FoldReport:
        self._gradient = gradient
        self.report = FoldReport(step=self.step)
        return self.report

    def allreduce_buffer(self, rank: int, size: int) -> torch.Tensor:
        n, given = self.num_elements, self._gradient.reshape(-1)
        buffer = given.new_zeros(n + HEALTH_NUMBERS * size, dtype=fold_dtype(self.dtype))
        own, health = buffer[:n], buffer[n:].view(HEALTH_NUMBERS, size)[:, rank]
        own.copy_(given)
        if self._carried is not None:
            own += torch.as_tensor(self._carried, device=own.device)
        finite = torch.isfinite(own)
        position = torch.where(finite.all(), 0, 1 + torch.argmin(finite.to(torch.uint8)))
        if self.report.first_nonfinite == n:  # this rank cancels the step
            position = torch.full_like(position, n + 1)
        for place in range(HEALTH_NUMBERS):  # the first is the highest
            shift = DIGIT_BITS * (HEALTH_NUMBERS - 1 - place)
            health[place] = (position >> shift) % (1 << DIGIT_BITS)
        return buffer

    def decode_sum(self, total: Any, size: int) -> tuple[torch.Tensor, dict[int, int], float]:
        n = self.num_elements
        summed = torch.as_tensor(total)
        values = summed[:n].to(fold_dtype(self.dtype))
        told = to_host(torch.cat([summed[n:].double(), torch.stack(values.aminmax()).double()]))
        return values, positions_by_rank(told[:-2], size), float(np.abs(told[-2:]).max())


def _has_no_repeats(indices: NDArray[np.int32]) -> bool:
    """True if it is certain that no index is repeated: the ascending runs do not overlap."""
    ends = np.flatnonzero(indices[1:] <= indices[:-1])
    firsts = indices[np.concatenate([[0], ends + 1])]
    lasts = indices[np.concatenate([ends, [indices.size - 1]])]
    order = np.argsort(firsts, kind="stable")
    return bool((lasts[order][:-1] < firsts[order][1:]).all())


def apply_scaled_sum(
    dense: torch.Tensor, indices: Any, values: Any, scale: float, kernels: ModuleType | None = None
) -> int:
    """Overwrites a tensor of zeros with ``scale * sum``; returns how many different indices the sum has.

    No two threads add to one element.
    """
    flat = dense.detach().view(-1)
    if indices is None:
        if len(values) != flat.numel():
            raise MessageError(f"ranks sent {len(values)} values for {flat.numel()} elements: use one model")
        if not isinstance(values, torch.Tensor):
            values = to_device(np.ascontiguousarray(values), flat.device)
        flat.copy_(values * scale)
        return flat.numel()
    where = checked(indices, flat.numel())
    kind = np.float64 if flat.dtype == torch.float64 else np.float32
    new = np.ascontiguousarray(values).reshape(-1).astype(kind, copy=False)
    if new.size != where.size:
        raise MessageError(f"{where.size} indices came with {new.size} values: use one version on all ranks")
    if where.size == 0:
        return 0
    if flat.itemsize == 2:
        new, scale = new * new.dtype.type(scale), 1.0
    kernels = kernels_for(flat.device) if kernels is None else kernels
    unique = _has_no_repeats(where)
    places, added = to_device(where, flat.device), to_device(new, flat.device)
    if not unique:
        places, order = torch.sort(places, stable=True)
        added = added[order]
    num_union = int(to_host(kernels.add_sum(flat, places, added, unique))[0])
    if scale != 1.0:
        # an index that stands twice is written twice with the same value
        flat[places.long()] = flat[places.long()] * scale
    return num_union
