"""Makes buckets on a device, for `calibration` to time."""

from __future__ import annotations

import torch

from horovod_sparse.arrays import Accumulator
from horovod_sparse.feedback import Recipe
from horovod_sparse.planning.calibration import BucketMemory
from horovod_sparse.sparsifiers import BucketInfo, SparseSum
from horovod_sparse.sparsifiers.dense import Dense
from horovod_sparse.tensors.device_memory import DeviceMemory
from horovod_sparse.tensors.gradients import HOST_DEVICES


def bucket_memory(device: torch.device) -> BucketMemory:
    return BucketMemory() if device.type in HOST_DEVICES else DeviceBucketMemory(device)


class DeviceBucketMemory(BucketMemory):
    """Makes the accumulators and gradients that a calibration times on a device; each method waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._memory = device, DeviceMemory(device)
        self._source: torch.Tensor | None = None

    def accumulator(self, info: BucketInfo, recipe: Recipe) -> Accumulator:
        made: Accumulator = self._memory.accumulator(info, recipe, whole=isinstance(recipe.sparsifier, Dense))
        return made

    def gradient(self, num_elements: int, dtype: str) -> torch.Tensor:
        generator = torch.Generator(self._device).manual_seed(1)
        drawn = torch.randn(num_elements, device=self._device, generator=generator)
        self._source = (drawn * drawn.abs()).to(getattr(torch, dtype))  # a heavy tail, as gradients have
        return torch.zeros_like(self._source)

    def refill(self, gradient: torch.Tensor) -> None:
        if self._source is not None:
            gradient.copy_(self._source)
        self._wait(gradient)

    def apply(self, gradient: torch.Tensor, total: SparseSum, size: int) -> None:
        indices = None if total.whole else total.indices
        self._memory.write([gradient], [(0, gradient.numel())], indices, total.values, 1.0 / size)
        self._wait(gradient)

    @staticmethod
    def _wait(gradient: torch.Tensor) -> None:
        gradient[:1].cpu()
