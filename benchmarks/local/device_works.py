"""What `device` times: the works of `works` on a GPU, and DRAGONN's, which hashes on the host."""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common.timing import Work
from benchmarks.local.works import Works
from horovod_sparse.sparsifiers.dragonn import HashFunction, survivors
from horovod_sparse.tensors import device_memory
from horovod_sparse.tensors import plain_kernels as torch_plain
from horovod_sparse.tensors.accumulator import TorchAccumulator


class DeviceWorks(Works):
    """Works on a device; a fold moves 16 bytes per element, a copy 8; budgets are twice a fold.

    Args:
        num_elements: n.
        density: kept fraction.
        num_ranks: P, whose messages are applied.
        device: its name.
    """

    apply_sum, clear_at = staticmethod(device_memory.apply_sum), staticmethod(device_memory.clear_at)

    def __init__(self, num_elements: int, density: float, num_ranks: int, device: str) -> None:
        self._device = torch.device(device)
        super().__init__(num_elements, density, num_ranks, (4.0, 4.0))
        self._accumulators["dragonn"] = self.accumulator()
        self._hash = HashFunction.draw(np.random.default_rng(2), self._k)

    def put(self, array: NDArray[np.float32]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def accumulator(self) -> TorchAccumulator:
        return TorchAccumulator(self._n, density=self._density, device=self._device)

    def refill(self) -> None:
        self._gradient.copy_(self._source)

    def seconds(self, work: Work) -> float:
        """Time of one run by the device's own clock, gaps in which it waits for the host included."""
        work.prepare()
        if self._device.type != "cuda":
            started = time.perf_counter()
            work.run()
            return time.perf_counter() - started
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self._device)
        start.record()
        work.run()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3

    def baseline(self) -> Work:
        """One copy of the gradient: 8 bytes per element."""
        return Work("copy", lambda: self._copy.copy_(self._source))

    def _hashed(self, hits: NDArray[np.int32]) -> NDArray[np.int32]:
        return survivors(hits, self._hash.slots(hits), self._k)

    def _step_dragonn(self) -> None:
        """A step of DRAGONN with an exact threshold, but for the network."""
        accumulator = self._accumulators["dragonn"]
        accumulator.fold(self._gradient)
        sent = self._hashed(accumulator.at_least(accumulator.kth_magnitude(self._k)))
        accumulator.take(sent)
        accumulator.clear(sent)
        self.apply_sum(self._gradient, self._gathered, self._sums)

    def steps(self) -> list[Work]:
        return [*super().steps(), Work(f"step: dragonn, P={self._ranks}", self._step_dragonn, self.refill)]

    def parts(self) -> list[Work]:
        gradient, union = self._gradient, self._union
        plain = TorchAccumulator(self._n, density=self._density, device=self._device, kernels=torch_plain)
        return [
            *super().parts(),
            Work("fold, plain PyTorch", lambda: plain.fold(gradient), self.refill, every=4),
            Work("hash k on the host", lambda: self._hashed(union)),
        ]

    def others(self) -> list[Work]:
        """See `others_in`."""
        return self.others_in(torch, self._source, self._copy)

    def check(self) -> bool:
        """Whether the selection is the one of torch.topk, on this very device and size."""
        accumulator = self.accumulator()
        self.refill()
        accumulator.fold(self._gradient)
        expected = torch.topk(self._source.abs(), self._k).values[-1].item()
        own = self._source[torch.from_numpy(accumulator.largest(self._k)).to(self._device).long()]
        return bool(
            accumulator.kth_magnitude(self._k) == expected
            and own.abs().min().item() == expected
            and own.numel() == self._k
            and not self._gradient.any().item()
        )

    def extra_memory(self) -> float | None:
        """What the steps need beyond residual and gradient, as a share of the gradient's memory; if known."""
        if self._device.type != "cuda":
            return None
        cuda, shares = torch.cuda, []
        for name, step in (("topk", self.step_topk), ("exclusive", self.step_exclusive)):
            self.refill()
            cuda.synchronize(self._device)
            cuda.reset_peak_memory_stats(self._device)
            before = cuda.memory_allocated(self._device)
            step(self._accumulators[name])
            cuda.synchronize(self._device)
            shares.append((cuda.max_memory_allocated(self._device) - before) / (4 * self._n))
        return float(max(shares))
