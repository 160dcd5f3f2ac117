"""Gradients that are not in the host's memory: tensors on one device. Loaded with the first of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from horovod_sparse.collectives import AllReduce, Synchronization
from horovod_sparse.feedback import Recipe
from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.tensors import gradients
from horovod_sparse.tensors.accumulator import KeptTensor, TorchAccumulator, accumulating
from horovod_sparse.tensors.memory import GradientMemory, Places, recipe_arguments, unscaled
from horovod_sparse.tensors.streams import CudaStreams
from horovod_sparse.tensors.transfer import to_device, to_host
from horovod_sparse.training.parts import REFUSED, Members, check_health


@functools.cache
def device_memory(device: torch.device) -> DeviceMemory:
    """The memory of a device, once it has shown that sparsifiers can work there."""
    torch.zeros(1, dtype=torch.float64, device=device).sqrt().cpu()
    return DeviceMemory(device)


class DeviceMemory(GradientMemory):
    """Tensors on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def accumulator(self, info: BucketInfo, recipe: Recipe) -> TorchAccumulator:
        return TorchAccumulator(
            info.num_elements, info.dtype, device=self._device, **recipe_arguments(recipe)
        )

    def companions(self, accumulator: TorchAccumulator) -> tuple[np.ndarray, ...]:
        return tuple(to_host(companion) for companion in accumulator.companions)

    def assign_companions(self, accumulator: TorchAccumulator, values: Sequence[np.ndarray]) -> None:
        for companion, new in zip(accumulator.companions, values, strict=True):
            companion.copy_(torch.from_numpy(np.array(new)).reshape(-1))

    def streams(self) -> CudaStreams | None:
        return CudaStreams(self._device) if self._device.type == "cuda" else None

    def foldable(self, gradient: torch.Tensor, loss_scale: float = 1.0) -> KeptTensor:
        return KeptTensor(unscaled(gradient, loss_scale))

    def summable(self, foldable: KeptTensor, whole: BucketInfo) -> torch.Tensor:
        return foldable.tensor.to(accumulating(whole.dtype)).reshape(-1)

    def shard(self, total: torch.Tensor, num_elements: int) -> KeptTensor:
        return KeptTensor(torch.cat([total, total.new_zeros(num_elements - total.numel())]))

    def scatter(self, gradient: torch.Tensor, indices: Places, values: np.ndarray, scale: float) -> int:
        return gradients.apply_scaled_sum(gradient, indices, values, scale)

    def zero(self, gradient: torch.Tensor) -> None:
        gradient.zero_()

    def clear(self, gradient: torch.Tensor, scattered: np.ndarray, probes: np.ndarray) -> bool:
        """Looking at the probes would make the host wait: all is cleared."""
        gradient.zero_()
        return False

    def sum_dense(
        self,
        name: str,
        gradient: torch.Tensor,
        carried: np.ndarray | None,
        place: tuple[int, int],
        *,
        refused: bool = False,
        members: Members = (),
    ) -> Synchronization[torch.Tensor]:
        """The elements stay on the device; the ranks' health is read."""
        rank, size = place
        count, wide = gradient.numel(), gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        buffer = torch.zeros(count + size, dtype=wide.dtype, device=self._device)
        own = buffer[:count]
        torch.add(wide, 0 if carried is None else to_device(carried, self._device), out=own)
        if refused:
            buffer[count + rank].fill_(REFUSED)
        else:
            finite = torch.isfinite(own)
            stops = torch.tensor([stop for _, stop in members], dtype=torch.int64, device=self._device)
            first = torch.searchsorted(stops, torch.argmin(finite.to(torch.uint8)), right=True)
            buffer[count + rank].copy_(torch.where(finite.all(), 0, 1 + first))
        total: Any = yield AllReduce(buffer)
        check_health(name, to_host(total[count:]), members)
        return total[:count]
