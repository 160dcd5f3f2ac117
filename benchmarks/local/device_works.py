"""What `device` times: the parts of a step on a GPU, whole local steps, and what others do."""

from __future__ import annotations

import functools
import importlib
import time

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common.timing import Work
from benchmarks.local.works import layered_gradient
from horovod_sparse.sparsifiers.dragonn import HashFunction, survivors
from horovod_sparse.tensors import plain_kernels as torch_plain
from horovod_sparse.tensors.accumulator import TorchAccumulator
from horovod_sparse.tensors.device_memory import apply_sum, clear_at

# Tiles and warps that `--tune` compares.
_SHAPES = ((1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8))


class DeviceWorks:
    """All works on one gradient of float32.

    Args:
        num_elements: n.
        density: kept fraction.
        num_ranks: P, whose messages are applied.
        device: name of the device.
        seed: of the generators.
    """

    def __init__(self, num_elements: int, density: float, num_ranks: int, device: str, seed: int = 0) -> None:
        self._n, self._ranks, self._device = num_elements, num_ranks, torch.device(device)
        self._k, self._density = max(1, round(density * num_elements)), density
        self._source = torch.from_numpy(layered_gradient(num_elements, seed)).to(self._device)
        self._gradient, self._copy = (torch.zeros_like(self._source) for _ in range(2))
        self._accumulators = {
            name: TorchAccumulator(num_elements, density=density, device=device)
            for name in ("parts", "topk", "exclusive", "dragonn")
        }
        generator = np.random.default_rng(seed + 1)
        picks = [self._picks(generator) for _ in range(num_ranks)]
        # Windows of different ranks, one behind the other, as an exclusive sparsifier receives them.
        self._union = np.roll(picks[0], -picks[0].size // 3)
        self._gathered = np.concatenate(picks)
        self._sums = generator.standard_normal(self._gathered.size, dtype=np.float32)
        self._hash = HashFunction.draw(generator, self._k)
        self._step = 0

    def _picks(self, generator: np.random.Generator) -> NDArray[np.int32]:
        return np.unique(generator.integers(0, self._n, self._k)).astype(np.int32)

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

    def _refill(self) -> None:
        # As backward would: the gradient is written, all caches are full of it.
        self._gradient.copy_(self._source)

    def _refold(self) -> None:
        self._refill()
        self._accumulators["parts"].fold(self._gradient)

    def _window(self) -> tuple[int, int]:
        self._step += 1
        part = self._step % self._ranks
        return self._n * part // self._ranks, self._n * (part + 1) // self._ranks

    def step_topk(self) -> None:
        """Everything a rank does in a step of top-k, but for the network."""
        accumulator = self._accumulators["topk"]
        accumulator.fold(self._gradient)
        own = accumulator.largest(self._k)
        accumulator.take(own)
        accumulator.clear(own)
        apply_sum(self._gradient, self._gathered, self._sums)
        clear_at(self._gradient, self._gathered)

    def step_exclusive(self) -> None:
        """Everything a rank does in a step of MiCRO or ExDyna with the sketch rule, but for the network."""
        accumulator = self._accumulators["exclusive"]
        accumulator.fold(self._gradient)
        threshold = accumulator.kth_magnitude(self._k)
        accumulator.at_least(threshold, *self._window())
        accumulator.take(self._union)
        accumulator.clear(self._union)
        apply_sum(self._gradient, self._union, self._sums[: self._union.size])

    def step_dragonn(self) -> None:
        """A step of DRAGONN with an exact threshold, but for the network."""
        accumulator = self._accumulators["dragonn"]
        accumulator.fold(self._gradient)
        hits = accumulator.at_least(accumulator.kth_magnitude(self._k))
        sent = self._hashed(hits)
        accumulator.take(sent)
        accumulator.clear(sent)
        apply_sum(self._gradient, self._gathered, self._sums)

    def _hashed(self, hits: NDArray[np.int32]) -> NDArray[np.int32]:
        # on the host, as the sparsifier does it
        return survivors(hits, self._hash.slots(hits), self._k)

    def baseline(self) -> Work:
        """One copy of the gradient: 8 bytes per element. A fold must move 16."""
        return Work("copy", lambda: self._copy.copy_(self._source))

    def steps(self) -> list[Work]:
        """Whole local steps; the budget is twice the time of the 16 bytes per element."""
        return [
            Work(f"step: exdyna or micro, P={self._ranks}", self.step_exclusive, self._refill, budget=4.0),
            Work(f"step: exact top-k, P={self._ranks}", self.step_topk, self._refill, budget=4.0),
            Work(f"step: dragonn, P={self._ranks}", self.step_dragonn, self._refill),
        ]

    def parts(self, tune: bool) -> list[Work]:
        """The parts of those steps, each in the state in which a step meets it.

        Args:
            tune: also folds of other shapes than the default.
        """
        part, k, gradient, union = self._accumulators["parts"], self._k, self._gradient, self._union
        threshold = [0.0]

        def prepare_threshold() -> None:
            self._refold()
            threshold[0] = part.kth_magnitude(k)

        plain = TorchAccumulator(self._n, density=self._density, device=self._device, kernels=torch_plain)
        works = [
            Work("fold", lambda: part.fold(gradient), self._refill),
            Work("fold, plain PyTorch", lambda: plain.fold(gradient), self._refill, every=4),
            Work("k-th magnitude", lambda: part.kth_magnitude(k), self._refold),
            Work("k largest", lambda: part.largest(k), self._refold),
            Work("at least, n/P", lambda: part.at_least(threshold[0], *self._window()), prepare_threshold),
            Work("at least, n", lambda: part.at_least(threshold[0]), prepare_threshold),
            Work("take k", lambda: part.take(union), self._refold),
            Work("clear k", lambda: part.clear(union), self._refold),
            Work("apply k", lambda: apply_sum(gradient, union, self._sums[: union.size]), self._refold),
            Work(
                f"apply {self._ranks} k",
                lambda: apply_sum(gradient, self._gathered, self._sums),
                self._refold,
            ),
            Work("hash k on the host", lambda: self._hashed(union)),
        ]
        return works + (self._shapes() if tune else [])

    def _shapes(self) -> list[Work]:
        fold = importlib.import_module("horovod_sparse.tensors.triton.fold").fold
        part = self._accumulators["parts"]
        arguments = (
            part._values,
            self._gradient,
            part._kernels.empty_maxima(),
            part._kernels.layout,
            torch.ones(4, device=self._device),
            torch.zeros(1, dtype=torch.float64, device=self._device),
        )
        return [
            Work(
                f"fold, tile {tile}, {warps} warps",
                functools.partial(fold, *arguments, plain=True, tile=tile, warps=warps),
                self._refill,
            )
            for tile, warps in _SHAPES
        ]

    def others(self) -> list[Work]:
        """What is usually done instead."""
        values, k = self._source, self._k
        threshold = float(values[::16].abs().topk(max(1, k // 16)).values[-1])

        def accumulate() -> None:
            self._copy.add_(self._gradient)
            self._gradient.zero_()

        return [
            Work("torch: residual.add_(gradient), gradient.zero_()", accumulate),
            Work("torch: abs() >= t, nonzero()", lambda: (values.abs() >= threshold).nonzero(), every=2),
            Work("torch: topk(abs(), k)", lambda: torch.topk(values.abs(), k), every=4),
        ]

    def check(self) -> bool:
        """Whether the selection is the one of torch.topk, on this very device and size."""
        accumulator = TorchAccumulator(self._n, density=self._density, device=self._device)
        self._refill()
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
        for step in (self.step_topk, self.step_exclusive):
            self._refill()
            cuda.synchronize(self._device)
            cuda.reset_peak_memory_stats(self._device)
            before = cuda.memory_allocated(self._device)
            step()
            cuda.synchronize(self._device)
            shares.append((cuda.max_memory_allocated(self._device) - before) / (4 * self._n))
        return float(max(shares))
