"""The accumulator in tensors, on any device of PyTorch."""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horovod_sparse.arrays import gradients
from horovod_sparse.arrays.accumulator import Accumulator
from horovod_sparse.arrays.protocol import FoldReport, FoldRule, Indices, Kernels, Values
from horovod_sparse.checks import check_density
from horovod_sparse.errors import ArgumentError
from horovod_sparse.kernels.host.scatter import checked
from horovod_sparse.kernels.layout import Layout
from horovod_sparse.kernels.quantization import Quantization
from horovod_sparse.tensors import plain_kernels
from horovod_sparse.tensors.streams import PendingCopy, PendingReport, to_device, to_host

_log = logging.getLogger("horovod_sparse")

# The one that comes with PyTorch 2.8; 3.3 does not compile all of the kernels.
_OLDEST_TRITON = (3, 4)
# Room for indices that is always there; a copy of 16 KB takes no longer than one of a word.
_ROOM = 4096
_NARROW = (torch.float32, torch.float16, torch.bfloat16)


def kernels_for(device: torch.device) -> ModuleType:
    """Returns the fastest kernels for a device: Triton's on CUDA if it is installed, else PyTorch's."""
    return _load_triton_kernels() if device.type == "cuda" else plain_kernels


@functools.cache
def _load_triton_kernels() -> ModuleType:
    try:
        import triton

        version = tuple(int(part) for part in triton.__version__.split(".")[:2])
        if version < _OLDEST_TRITON:
            oldest = ".".join(map(str, _OLDEST_TRITON))
            raise ImportError(f"Triton {triton.__version__} is installed: install {oldest} or later")
        from horovod_sparse.tensors import triton as triton_kernels
    except ImportError as error:
        _log.warning(
            "sparsifiers on CUDA use plain PyTorch, several times slower than their Triton kernels: %s", error
        )
        return plain_kernels
    return triton_kernels


def fold_dtype(dtype: Any) -> torch.dtype:
    """Returns the dtype of PyTorch in which gradients accumulate: float64 for float64, else float32."""
    return torch.float64 if gradients.fold_dtype(dtype) is np.float64 else torch.float32


class TorchAccumulator(Accumulator):
    """An accumulator on a device, which arrays of n elements leave only for checkpoints and new plans.

    Arguments are those of `HostAccumulator`; `kernels` are other bodies than the device's (measurements,
    tests).

    Example:
        >>> accumulator = TorchAccumulator(4, density=0.5, device="cpu")
        >>> accumulator.fold(torch.tensor([1.0, -3.0, 0.0, 2.0])).square_norm
        14.0
        >>> accumulator.largest(2)
        array([1, 3], dtype=int32)
    """

    def __init__(
        self,
        num_elements: int,
        dtype: Any = "float32",
        *,
        density: float = 0.001,
        companions: int = 0,
        device: torch.device | str = "cuda",
        kernels: ModuleType | None = None,
    ) -> None:
        check_density("density", density, "a number in (0, 1]")
        layout = Layout(int(num_elements), plain_kernels.device_block_size(density))
        # "cuda" becomes "cuda:0", as in the gradients' device
        place, expected = torch.empty(0, device=device).device, round(density * num_elements)
        bodies = kernels or kernels_for(place)
        super().__init__(TensorKernels(layout, fold_dtype(dtype), place, expected, bodies), companions)

    @property
    def device(self) -> torch.device:
        device: torch.device = self._values.device
        return device


class TensorKernels(Kernels):
    """Kernels on PyTorch tensors; indices and sums stay on the device, so that the host seldom waits.

    A threshold will find about as many elements as are `expected`; `bodies` are `plain_kernels`, or a module
    with its functions.
    """

    def __init__(
        self, layout: Layout, kind: torch.dtype, device: torch.device, expected: int, bodies: ModuleType
    ) -> None:
        self.layout, self._bodies = layout, bodies
        self.dtype = np.dtype(np.float64 if kind == torch.float64 else np.float32)
        self._kind, self._device = kind, device
        # Count and indices come in one copy if there is room for all: twice as many as last time.
        self._room = max(_ROOM, 2 * expected)
        # On the device, where kernels read them in the accumulator's precision: a launch argument has less.
        self._factors: tuple[NDArray[Any], Tensor] = (np.empty(0), torch.empty(0))

    def zeros(self) -> Tensor:
        return torch.zeros(self.layout.num_elements, dtype=self._kind, device=self._device)

    def _checked_gradient(self, gradient: Tensor) -> Tensor:
        if gradient.numel() != self.layout.num_elements:
            raise ArgumentError("gradient", tuple(gradient.shape), f"{self.layout.num_elements} elements")
        if gradient.device != self._device:
            raise ArgumentError("gradient", gradient.device, f"a tensor on {self._device}")
        kinds = (torch.float64,) if self._kind == torch.float64 else _NARROW
        if gradient.dtype not in kinds:
            raise ArgumentError("gradient", gradient.dtype, f"one of {kinds}")
        return gradient.detach()

    def fold(
        self,
        values: Tensor,
        companion: Tensor | None,
        gradient: Tensor,
        maxima: Tensor,
        rule: FoldRule,
        norm: Tensor,
        step: int,
    ) -> tuple[FoldReport, Tensor]:
        factors, gradient = rule.factors(self.dtype), self._checked_gradient(gradient)
        if rule.clip_norm is not None:
            gradient = clipped(gradient, rule.clip_norm)
        report = self._bodies.fold(
            values,
            gradient.reshape(-1),
            maxima,
            self.layout,
            self._on_device(factors),
            norm,
            companion,
            moment=rule.moment is not None,
            plain=factors[0] == 1.0,
        )
        self._pending = PendingCopy(report)
        return PendingReport(self._pending, step), report[2:3]

    def with_projection(self, report: FoldReport, samples: Any, signs: Any, rule: FoldRule) -> FoldReport:
        before, after, moment = (one.double() for one in samples)
        along, factors = to_device(signs, self._device), rule.factors(self.dtype).tolist()
        projection = gradients.projection_on(before, after, moment, along, factors, torch)
        return PendingReport(self._pending, report.step, PendingCopy(projection.view(1)))

    def _on_device(self, factors: NDArray[Any]) -> Tensor:
        if not np.array_equal(self._factors[0], factors):
            self._factors = factors, to_device(factors, self._device)
        return self._factors[1]

    def undo_fold(self, values: Tensor, companion: Tensor | None, gradient: Tensor, rule: FoldRule) -> None:
        step = self._checked_gradient(gradient)
        step = step if rule.clip_norm is None else clipped(step, rule.clip_norm)
        step = step.reshape(-1).to(self._kind)
        gradients.undo_fold(values, companion, step, rule, rule.factors(self.dtype).tolist(), torch)

    def assign(self, values: Tensor, new: Any) -> None:
        new = new.detach() if isinstance(new, Tensor) else torch.from_numpy(np.array(new))
        if new.numel() != values.numel():
            raise ArgumentError("values", tuple(new.shape), f"an array of {values.numel()} elements")
        new = new.to(self._kind).reshape(-1)
        if not bool(torch.isfinite(new).all()):
            raise ArgumentError("values", "NaN or Inf", "finite numbers")
        values.copy_(new)

    def empty_maxima(self) -> Tensor:
        kind = plain_kernels.int_type(self._kind)
        return torch.empty(self.layout.num_blocks, dtype=kind, device=self._device)

    def scan_maxima(self, values: Tensor, maxima: Tensor) -> None:
        plain_kernels.scan_maxima(values, maxima, self.layout)

    def refresh_maxima(self, values: Tensor, maxima: Tensor, where: Tensor) -> None:
        self._bodies.refresh_maxima(values, maxima, self.layout, where)

    def largest(self, values: Tensor, maxima: Tensor, k: int, start: int, stop: int) -> tuple[Indices, None]:
        for dense in (False, True):
            report, found = self._bodies.largest(values, maxima, self.layout, k, start, stop, dense)
            (bits, overflow), indices = PendingCopy(report, found).arrays()
            # Where fewer than k are not 0, zeros are selected too, and the block maxima do not say where.
            if bits and not overflow:
                break
        return indices, None

    def largest_of_each(self, values: Tensor, chunk: int, quotas: NDArray[np.int64]) -> tuple[Indices, None]:
        indices = plain_kernels.largest_of_each(values, chunk, to_device(quotas, self._device))
        return to_host(indices), None

    def kth(self, values: Tensor, maxima: Tensor, k: int, start: int, stop: int) -> int:
        for dense in (False, True):
            bits, overflow = to_host(self._bodies.kth(values, maxima, self.layout, k, start, stop, dense))
            if not overflow:
                break
        return int(bits)

    def at_least(self, values: Tensor, maxima: Tensor, bits: Any, start: int, stop: int) -> Indices:
        while True:
            room = min(self._room, stop - start)
            found = self._bodies.at_least(values, maxima, self.layout, int(bits), start, stop, room)
            (count,), indices = PendingCopy(*found).arrays()
            self._room = max(_ROOM, 2 * int(count))
            if count <= room:
                return indices[:count]

    def sample(self, values: Tensor, stride: int, offset: int) -> Values:
        return to_host(values[offset::stride].abs())

    def checked_indices(self, indices: Any, *, keep: bool = False) -> Tensor:
        return to_device(checked(indices, self.layout.num_elements), self._device)

    def from_host(self, values: Any) -> Tensor:
        return to_device(np.ascontiguousarray(values, self.dtype).reshape(-1), self._device)

    def to_host(self, memory: Tensor) -> Values:
        return to_host(memory)

    def view(self, values: Tensor) -> Values:
        view: Values = values.detach().cpu().numpy().view()
        return view

    def take(self, values: Tensor, where: Tensor) -> Tensor:
        return values.index_select(0, where)

    def zero(self, values: Tensor, where: Tensor) -> None:
        self._bodies.zero(values, where)

    def put(self, values: Tensor, where: Tensor, new: Tensor) -> None:
        self._bodies.put(values, where, new)

    def add(self, values: Tensor, where: Tensor, olds: Tensor, new: Tensor) -> None:
        self._bodies.add(values, where, torch.where(torch.isfinite(olds + new), new, 0.0))

    def sum_of_squares(self, values: Tensor) -> Tensor:
        return torch.linalg.vector_norm(values, dtype=torch.float64).square().view(1)

    def number(self, value: float) -> Tensor:
        return torch.full((1,), value, dtype=torch.float64, device=self._device)

    def float_of(self, number: Tensor) -> float:
        return float(to_host(number)[0])

    def updated_norm(self, norm: Tensor, old: Tensor, new: Tensor | None = None) -> Tensor:
        left = (norm - self.sum_of_squares(old)).clamp_(min=0.0)
        return left if new is None else left + self.sum_of_squares(new)

    def quantize(self, values: Tensor, code: Quantization, key: int, words: NDArray[np.int32]) -> Tensor:
        written, rest = plain_kernels.encode(values, code, key)
        words[:] = to_host(written)
        return rest


def clipped(gradient: Tensor, clip_norm: float) -> Tensor:
    """Returns ``min(1, clip_norm / norm) * gradient``, norm being of finite elements. Never waits."""
    if gradient.numel() == 0:
        return gradient
    finite = torch.nan_to_num(gradient.double(), nan=0.0, posinf=0.0, neginf=0.0)
    top = finite.abs().max()
    # Relative to the largest, so that no square overflows.
    norm = top * torch.linalg.vector_norm(finite / torch.where(top > 0, top, 1.0))
    factor = torch.where(norm > clip_norm, clip_norm / norm, 1.0)
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    return wide * factor.to(wide.dtype)
