"""What `scripts/bench local` times: the parts of a step, whole local steps, and what others do."""

from __future__ import annotations

import importlib
import tracemalloc
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.timing import Work
from horovod_sparse.arrays import HostAccumulator
from horovod_sparse.kernels import apply_sum, clear_at


def layered_gradient(num_elements: int, seed: int = 0) -> NDArray[np.float32]:
    """Numbers like those of a network: layers from 1 000 to 2.5 million elements, each with its own scale.

    Args:
        num_elements: n.
        seed: of the generator.

    Returns:
        float32, shape (n,): half the layers Gaussian, half Laplace.
    """
    generator = np.random.default_rng(seed)
    gradient = np.empty(num_elements, np.float32)
    start = 0
    while start < num_elements:
        stop = min(num_elements, start + int(10 ** generator.uniform(3, 6.4)))
        layer = generator.standard_normal(stop - start, dtype=np.float32)
        if generator.random() < 0.5:
            # A Laplace number is a Gaussian one times the root of twice an exponential one.
            layer *= np.sqrt(2 * generator.standard_exponential(stop - start, dtype=np.float32))
        gradient[start:stop] = layer * np.float32(10 ** generator.normal(-3, 0.5))
        start = stop
    return gradient


def _torch() -> Any:
    """PyTorch on one thread, or None. Only compared with, so it may be missing."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    torch.set_num_threads(1)
    return torch


class LocalWorks:
    """All works on one gradient.

    Args:
        num_elements: n.
        density: kept fraction.
        num_ranks: P, whose messages are applied.
        seed: of the generators.
    """

    def __init__(self, num_elements: int, density: float, num_ranks: int = 8, seed: int = 0) -> None:
        self._n, self._ranks = num_elements, num_ranks
        self._k = max(1, round(density * num_elements))
        self.source = layered_gradient(num_elements, seed)
        self._gradient = np.zeros(num_elements, np.float32)
        self._copy = np.zeros(num_elements, np.float32)
        self._density = density
        self._accumulators = {name: self._accumulator() for name in ("parts", "topk", "exdyna")}
        generator = np.random.default_rng(seed + 1)
        picks = [np.sort(generator.choice(num_elements, self._k, replace=False)) for _ in range(num_ranks)]
        self._union = picks[0].astype(np.int32)
        self._gathered = np.concatenate(picks).astype(np.int32)
        self._sums = generator.standard_normal(self._gathered.size, dtype=np.float32)
        self._step = 0
        self._torch = _torch()

    def _accumulator(self) -> HostAccumulator:
        return HostAccumulator(self._n, density=self._density)

    def _refill(self) -> None:
        # As backward would: the gradient is written, all caches are full of it.
        np.copyto(self._gradient, self.source)

    def _refold(self) -> None:
        self._refill()
        self._accumulators["parts"].fold(self._gradient)

    def _window(self) -> tuple[int, int]:
        self._step += 1
        part = self._step % self._ranks
        return self._n * part // self._ranks, self._n * (part + 1) // self._ranks

    def step_topk(self, accumulator: HostAccumulator) -> None:
        """Everything a rank does in a step of top-k, but for the network."""
        accumulator.fold(self._gradient)
        own = accumulator.largest(self._k)
        accumulator.take(own)
        accumulator.clear(own)
        apply_sum(self._gradient, self._gathered, self._sums)
        clear_at(self._gradient, self._gathered)

    def step_exclusive(self, accumulator: HostAccumulator) -> None:
        """Everything a rank does in a step of MiCRO or ExDyna with the sketch rule, but for the network."""
        accumulator.fold(self._gradient)
        threshold = accumulator.kth_magnitude(self._k)
        accumulator.at_least(threshold, *self._window())
        accumulator.take(self._union)
        accumulator.clear(self._union)
        apply_sum(self._gradient, self._union, self._sums[: self._k])

    def baseline(self) -> Work:
        """One copy of the gradient."""
        if self._torch is None:
            return Work("np.copyto", lambda: np.copyto(self._copy, self.source))
        source, copy = self._torch.from_numpy(self.source), self._torch.from_numpy(self._copy)
        return Work("copy_", lambda: copy.copy_(source))

    def steps(self) -> list[Work]:
        """Whole local steps, with their budgets (which are for the usual density, 0.001)."""
        accumulators, usual = self._accumulators, self._density <= 0.001
        return [
            Work(
                f"step: exdyna or micro, P={self._ranks}",
                lambda: self.step_exclusive(accumulators["exdyna"]),
                self._refill,
                budget=2.5 if usual else None,
            ),
            Work(
                f"step: exact top-k, P={self._ranks}",
                lambda: self.step_topk(accumulators["topk"]),
                self._refill,
                budget=3.5 if usual else None,
            ),
        ]

    def parts(self) -> list[Work]:
        """The parts of those steps, each in the state in which a step meets it."""
        part, k = self._accumulators["parts"], self._k
        gradient, union, gathered, sums = self._gradient, self._union, self._gathered, self._sums
        threshold = np.array([0.0])

        def prepare_threshold() -> None:
            self._refold()
            threshold[0] = part.kth_magnitude(k)

        return [
            Work("fold", lambda: part.fold(gradient), self._refill),
            Work("k-th magnitude", lambda: part.kth_magnitude(k), self._refold),
            Work("k largest", lambda: part.largest(k), self._refold),
            Work("at least, n/P", lambda: part.at_least(threshold[0], *self._window()), prepare_threshold),
            Work("take k", lambda: part.take(union), self._refold),
            Work("clear k", lambda: part.clear(union), self._refold),
            Work("apply k", lambda: apply_sum(gradient, union, sums[:k]), self._refold),
            Work(f"apply {self._ranks} k", lambda: apply_sum(gradient, gathered, sums), self._refold),
        ]

    def others(self) -> list[Work]:
        """What is usually done instead."""
        torch = self._torch
        if torch is None:
            return []
        values, out, k = torch.from_numpy(self.source), torch.from_numpy(self._copy), self._k
        threshold = float(np.partition(np.abs(self.source[::16]), -max(1, k // 16))[-max(1, k // 16)])
        plain = torch.zeros(self._n)

        def accumulate() -> None:
            plain.add_(out)
            out.zero_()

        return [
            Work("torch: residual.add_(gradient), gradient.zero_()", accumulate),
            Work("torch: abs() >= t, nonzero()", lambda: (values.abs() >= threshold).nonzero(), every=4),
            Work("torch: topk(abs(), k)", lambda: torch.topk(values.abs(), k), every=8),
        ]

    def extra_memory(self) -> float:
        """What a step needs beyond residual and gradient, as a share of the gradient's memory."""
        shares = []
        for step in (self.step_topk, self.step_exclusive):
            self._refill()
            tracemalloc.start()
            accumulator = self._accumulator()
            residual = tracemalloc.get_traced_memory()[0]
            step(accumulator)
            shares.append((tracemalloc.get_traced_memory()[1] - residual) / self._gradient.nbytes)
            tracemalloc.stop()
        return max(shares)
