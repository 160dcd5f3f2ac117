"""What `scripts/bench local` times beside whole steps: their parts, and how PyTorch does the same."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common.gradients import GradientSource, random_layers
from benchmarks.common.timing import Work, seconds_by
from horovod_sparse import kernels
from horovod_sparse.arrays import Accumulator, GradientParts, HostAccumulator
from horovod_sparse.tensors.accumulator import TorchAccumulator
from horovod_sparse.tensors.device_memory import DeviceMemory


class Works:
    """Times work on one float32 gradient in the host's memory.

    Args:
        num_elements: n.
        density: kept fraction.
        num_ranks: P, whose messages are applied.
    """

    def __init__(self, num_elements: int, density: float, num_ranks: int) -> None:
        self.num_elements, self.density, self.num_ranks = num_elements, density, num_ranks
        self.k = max(1, round(density * num_elements))
        self.drawn = np.empty(num_elements, np.float32)
        GradientSource(random_layers(num_elements), rank=0).fill(self.drawn)
        self.source, self.gradient, self._copy = (
            self.put(array) for array in (self.drawn, *np.zeros((2, num_elements), np.float32))
        )

    def put(self, array: NDArray[np.float32]) -> Any:
        """Moves an array to the memory that is measured."""
        return array

    def accumulator(self, companions: int = 0) -> Accumulator:
        return HostAccumulator(self.num_elements, density=self.density, companions=companions)

    def fold_input(self) -> Any:
        """Returns the gradient as the front ends fold it: it stays readable until its sum is there."""
        return GradientParts([self.gradient])

    def refill(self) -> None:
        """Writes the gradient as backward would: all caches are full of it."""
        np.copyto(self.gradient, self.source)

    def apply(self, indices: Any, values: Any) -> None:
        """Writes the mean over ranks into the gradient; without indices it has all elements."""
        kernels.apply_scaled_sum(self.gradient, indices, values, 1.0 / self.num_ranks)

    def seconds(self, work: Work) -> float:
        return seconds_by(work)

    def extra_memory(self, step: Callable[[Accumulator], None]) -> float | None:
        """Returns what a step needs beyond residual and gradient, as a share of it; None if unknown."""
        self.refill()
        tracemalloc.start()
        accumulator = self.accumulator()
        residual = tracemalloc.get_traced_memory()[0]
        step(accumulator)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return (peak - residual) / (4 * self.num_elements)

    def parts(self) -> list[Work]:
        """Returns the parts of a step, each in the state in which a step meets it."""
        k, gradient, part = self.k, self.gradient, self.accumulator()
        generator, threshold, window = np.random.default_rng(1), [0.0], self.num_elements // self.num_ranks
        picks = [np.unique(generator.integers(0, self.num_elements, k)) for _ in range(self.num_ranks)]
        union, gathered = picks[0].astype(np.int32), np.concatenate(picks).astype(np.int32)
        sums = generator.standard_normal(gathered.size, dtype=np.float32)
        own = sums[: union.size]

        def refold() -> None:
            self.refill()
            part.fold(gradient)

        def prepare_threshold() -> None:
            refold()
            threshold[0] = part.kth_magnitude(k)

        return [
            Work("fold", lambda: part.fold(gradient), self.refill),
            Work("k-th magnitude", lambda: part.kth_magnitude(k), refold),
            Work("k largest", lambda: part.largest(k), refold),
            Work("at least, n/P", lambda: part.at_least(threshold[0], 0, window), prepare_threshold),
            Work("take k", lambda: part.take(union), refold),
            Work("clear k", lambda: part.clear(union), refold),
            Work("write k", lambda: self.apply(union, own), refold),
            Work(f"write {self.num_ranks} k", lambda: self.apply(gathered, sums), refold),
        ]

    def baseline(self) -> Work:
        """Returns one copy of the gradient: 8 bytes per element."""
        source, copy = map(torch.as_tensor, (self.source, self._copy))
        return Work("copy_", lambda: copy.copy_(source))

    def others(self) -> list[Work]:
        """Returns PyTorch's usual ways to do the same."""
        (values, copy), k = map(torch.as_tensor, (self.source, self._copy)), self.k
        residual = torch.zeros_like(copy)
        threshold = float(values[::16].abs().topk(max(1, k // 16)).values[-1])

        def accumulate() -> None:
            residual.add_(copy)
            copy.zero_()

        return [
            Work("torch: residual.add_(gradient), gradient.zero_()", accumulate),
            Work("torch: abs() >= t, nonzero()", lambda: (values.abs() >= threshold).nonzero(), every=4),
            Work("torch: topk(abs(), k)", lambda: torch.topk(values.abs(), k), every=8),
        ]


class DeviceWorks(Works):
    """Times work on a gradient in a device's memory, by the device's clock, which counts idle gaps, too."""

    def __init__(self, num_elements: int, density: float, num_ranks: int, device: str) -> None:
        self._device = torch.device(device)
        self._memory = DeviceMemory(self._device)
        super().__init__(num_elements, density, num_ranks)

    def put(self, array: NDArray[np.float32]) -> Any:
        return torch.from_numpy(array).to(self._device)

    def accumulator(self, companions: int = 0) -> Any:
        more = {"companions": companions, "device": self._device}
        return TorchAccumulator(self.num_elements, density=self.density, **more)

    def fold_input(self) -> Any:
        return self.gradient

    def refill(self) -> None:
        self.gradient.copy_(self.source)

    def apply(self, indices: Any, values: Any) -> None:
        whole = [(0, self.num_elements)]
        self._memory.write([self.gradient], whole, indices, values, 1.0 / self.num_ranks)

    def seconds(self, work: Work) -> float:
        if self._device.type != "cuda":
            return super().seconds(work)
        work.prepare()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self._device)
        start.record()
        work.run()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3

    def extra_memory(self, step: Callable[[Accumulator], None]) -> float | None:
        if self._device.type != "cuda":
            return None
        cuda, accumulator = torch.cuda, self.accumulator()
        self.refill()
        cuda.synchronize(self._device)
        cuda.reset_peak_memory_stats(self._device)
        before = cuda.memory_allocated(self._device)
        step(accumulator)
        cuda.synchronize(self._device)
        return float((cuda.max_memory_allocated(self._device) - before) / (4 * self.num_elements))
