"""Buckets and time stamps on a device, with which PyTorch's front ends measure for plans."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from horovod_sparse.arrays import Accumulator
from horovod_sparse.feedback import Recipe
from horovod_sparse.planning.calibration import BucketMemory
from horovod_sparse.planning.warmup import HostStamps
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
        held: Accumulator = self._memory.accumulator(info, recipe, whole=isinstance(recipe.sparsifier, Dense))
        return held

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


class EventStamps(HostStamps):
    """Takes times by CUDA events, since hooks run before the GPU has computed the gradient."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda

    def now(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    def seconds_between(self, start: Any, stop: Any) -> float:
        start.synchronize()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3


def stamps_for(devices: Iterable[str]) -> HostStamps:
    """Returns CUDA events if all gradients are on one GPU, else the host's clock."""
    distinct = {torch.device(name) for name in devices}
    if len(distinct) == 1 and (device := distinct.pop()).type == "cuda":
        return EventStamps(device)
    return HostStamps()
