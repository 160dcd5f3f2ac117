"""What `scripts/bench local` times: the parts of a step, whole local steps, and what others do."""

from __future__ import annotations

import abc
import importlib
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.timing import Work
from horovod_sparse import kernels
from horovod_sparse.arrays import HostAccumulator


def layered_gradient(num_elements: int, seed: int = 0) -> NDArray[np.float32]:
    """Numbers like those of a network: layers from 1 000 to 2.5 million elements, each with its own scale.

    Half the layers are Gaussian, half Laplace.
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


class Works(abc.ABC):
    """All works on one gradient of float32, on the host or on a device.

    Args:
        num_elements: n.
        density: kept fraction.
        num_ranks: P, whose messages are applied.
        budgets: of the steps of ExDyna and of top-k, by one copy of the gradient.
        seed: of the generators.
    """

    #: of the memory
    apply_sum: Callable[..., Any]
    clear_at: Callable[..., Any]

    def __init__(
        self, num_elements: int, density: float, num_ranks: int, budgets: tuple[Any, Any], seed: int = 0
    ) -> None:
        self._n, self._ranks, self._density = num_elements, num_ranks, density
        self._k, self._budgets, self._step = max(1, round(density * num_elements)), budgets, 0
        self._source: Any = self.put(layered_gradient(num_elements, seed))
        self._gradient, self._copy = (self.put(np.zeros(num_elements, np.float32)) for _ in range(2))
        self._accumulators: dict[str, Any] = {
            name: self.accumulator() for name in ("parts", "topk", "exclusive")
        }
        generator = np.random.default_rng(seed + 1)
        picks = [np.unique(generator.integers(0, num_elements, self._k)) for _ in range(num_ranks)]
        self._union = picks[0].astype(np.int32)
        self._gathered = np.concatenate(picks).astype(np.int32)
        self._sums = generator.standard_normal(self._gathered.size, dtype=np.float32)

    @abc.abstractmethod
    def put(self, array: NDArray[np.float32]) -> Any:
        """Moves an array to the memory that is measured."""

    @abc.abstractmethod
    def accumulator(self) -> Any:
        """A fresh one."""

    @abc.abstractmethod
    def refill(self) -> None:
        """Writes the gradient as backward would: all caches are full of it."""

    def _refold(self) -> None:
        self.refill()
        self._accumulators["parts"].fold(self._gradient)

    def _window(self) -> tuple[int, int]:
        self._step += 1
        part = self._step % self._ranks
        return self._n * part // self._ranks, self._n * (part + 1) // self._ranks

    def step_topk(self, accumulator: Any) -> None:
        """Everything a rank does in a step of top-k, but for the network."""
        accumulator.fold(self._gradient)
        own = accumulator.largest(self._k)
        accumulator.take(own)
        accumulator.clear(own)
        self.apply_sum(self._gradient, self._gathered, self._sums)
        self.clear_at(self._gradient, self._gathered)

    def step_exclusive(self, accumulator: Any) -> None:
        """Everything a rank does in a step of MiCRO or ExDyna with the sketch rule, but for the network."""
        accumulator.fold(self._gradient)
        threshold = accumulator.kth_magnitude(self._k)
        accumulator.at_least(threshold, *self._window())
        accumulator.take(self._union)
        accumulator.clear(self._union)
        self.apply_sum(self._gradient, self._union, self._sums[: self._union.size])

    def steps(self) -> list[Work]:
        """Whole local steps, with their budgets."""
        made, (exclusive, topk) = self._accumulators, self._budgets
        return [
            Work(
                f"step: exdyna or micro, P={self._ranks}",
                lambda: self.step_exclusive(made["exclusive"]),
                self.refill,
                exclusive,
            ),
            Work(
                f"step: exact top-k, P={self._ranks}", lambda: self.step_topk(made["topk"]), self.refill, topk
            ),
        ]

    def parts(self) -> list[Work]:
        """The parts of those steps, each in the state in which a step meets it."""
        part, k, gradient, union = self._accumulators["parts"], self._k, self._gradient, self._union
        own, threshold = self._sums[: union.size], [0.0]

        def prepare_threshold() -> None:
            self._refold()
            threshold[0] = part.kth_magnitude(k)

        every = f"apply {self._ranks} k"
        return [
            Work("fold", lambda: part.fold(gradient), self.refill),
            Work("k-th magnitude", lambda: part.kth_magnitude(k), self._refold),
            Work("k largest", lambda: part.largest(k), self._refold),
            Work("at least, n/P", lambda: part.at_least(threshold[0], *self._window()), prepare_threshold),
            Work("take k", lambda: part.take(union), self._refold),
            Work("clear k", lambda: part.clear(union), self._refold),
            Work("apply k", lambda: self.apply_sum(gradient, union, own), self._refold),
            Work(every, lambda: self.apply_sum(gradient, self._gathered, self._sums), self._refold),
        ]

    def others_in(self, torch: Any, values: Any, copy: Any) -> list[Work]:
        """PyTorch's usual ways to do the same."""
        k, residual = self._k, torch.zeros_like(copy)
        threshold = float(values[::16].abs().topk(max(1, k // 16)).values[-1])

        def accumulate() -> None:
            residual.add_(copy)
            copy.zero_()

        return [
            Work("torch: residual.add_(gradient), gradient.zero_()", accumulate),
            Work("torch: abs() >= t, nonzero()", lambda: (values.abs() >= threshold).nonzero(), every=4),
            Work("torch: topk(abs(), k)", lambda: torch.topk(values.abs(), k), every=8),
        ]


def _torch() -> Any:
    """PyTorch on one thread, or None. Only compared with, so it may be missing."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    torch.set_num_threads(1)
    return torch


class LocalWorks(Works):
    """Works on the host, by NumPy; budgets are those of the usual density."""

    apply_sum, clear_at = staticmethod(kernels.apply_sum), staticmethod(kernels.clear_at)

    def __init__(self, num_elements: int, density: float, num_ranks: int = 8, seed: int = 0) -> None:
        super().__init__(
            num_elements, density, num_ranks, (2.5, 3.5) if density <= 0.001 else (None, None), seed
        )
        self.source, self._torch = self._source, _torch()

    def put(self, array: NDArray[np.float32]) -> NDArray[np.float32]:
        return array

    def accumulator(self) -> HostAccumulator:
        return HostAccumulator(self._n, density=self._density)

    def refill(self) -> None:
        np.copyto(self._gradient, self._source)

    def baseline(self) -> Work:
        """One copy of the gradient."""
        if self._torch is None:
            return Work("np.copyto", lambda: np.copyto(self._copy, self.source))
        source, copy = self._torch.from_numpy(self.source), self._torch.from_numpy(self._copy)
        return Work("copy_", lambda: copy.copy_(source))

    def others(self) -> list[Work]:
        """See `others_in`."""
        if self._torch is None:
            return []
        return self.others_in(self._torch, *map(self._torch.from_numpy, (self.source, self._copy)))

    def extra_memory(self) -> float:
        """What a step needs beyond residual and gradient, as a share of the gradient's memory."""
        shares = []
        for step in (self.step_topk, self.step_exclusive):
            self.refill()
            tracemalloc.start()
            accumulator = self.accumulator()
            residual = tracemalloc.get_traced_memory()[0]
            step(accumulator)
            shares.append((tracemalloc.get_traced_memory()[1] - residual) / self._gradient.nbytes)
            tracemalloc.stop()
        return max(shares)
