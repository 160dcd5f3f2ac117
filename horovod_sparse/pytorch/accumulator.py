"""The accumulator in a tensor's memory, on any device PyTorch knows."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horovod_sparse.arrays.gradients import checked_factors
from horovod_sparse.arrays.protocol import FoldReport, Indices, Moments, Values
from horovod_sparse.errors import ArgumentError
from horovod_sparse.kernels.host.scatter import checked
from horovod_sparse.kernels.layout import Layout
from horovod_sparse.kernels.quantization import Quantization
from horovod_sparse.pytorch import quantize
from horovod_sparse.pytorch.backend import kernels_for
from horovod_sparse.pytorch.gradients import (
    KeptTensor,
    accumulating,
    checked_gradient,
    clip,
    take_out,
)
from horovod_sparse.pytorch.journal import Journal, sum_of_squares
from horovod_sparse.pytorch.plain import device_block_size
from horovod_sparse.pytorch.selection import Selection
from horovod_sparse.pytorch.transfer import PendingCopy, PendingReport, on_device, to_device, to_host


class TorchAccumulator:
    """Residual plus gradient of one bucket, in a tensor; implements `Accumulator`.

    What has n elements never leaves the device; indices and values that a sparsifier sees are NumPy
    arrays on the host. Selections, sums and residuals are those of `HostAccumulator`, bit for bit.

    Args:
        num_elements: n.
        dtype: of the gradients, as a name or a dtype; the accumulator is float64 for float64, else float32.
        density: kept fraction that selections will have, in (0, 1]; it decides the block size.
        companions: how many tensors of n elements are kept beside the values. They are cleared with them
            (the velocity of momentum correction), or the first follows them (what a low-pass filter
            sums up): each change of a value is one of its own, too.
        device: where the memory is.
        memory: the residual's own memory, shape (n,), contiguous, of the accumulator's type; its values
            stay, and nobody else may write to it from now on. None: new, zeros, on `device`.
        kernels: another implementation than the device's (measurements, tests).

    Raises:
        ArgumentError: an argument is outside what is allowed.

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
        memory: Tensor | None = None,
        kernels: ModuleType | None = None,
    ) -> None:
        if not 0.0 < density <= 1.0:
            raise ArgumentError("density", density, "a number in (0, 1]")
        self._layout = Layout(int(num_elements), device_block_size(density))
        kind = accumulating(dtype)
        if memory is not None and (
            memory.dtype != kind or memory.shape != (num_elements,) or not memory.is_contiguous()
        ):
            raise ArgumentError(
                "memory", (memory.dtype, tuple(memory.shape)), f"contiguous {kind}[{num_elements}]"
            )
        self._values = (
            torch.zeros(num_elements, dtype=kind, device=device) if memory is None else memory.detach()
        )
        self._kernels = kernels_for(self._values.device) if kernels is None else kernels
        self._companions = tuple(torch.zeros_like(self._values) for _ in range(companions))
        self._journal = Journal(self._kernels, self._values, self._companions)
        self._selection = Selection(
            self._kernels, self._values, self._layout, self._journal, round(density * num_elements)
        )
        # On the device, where kernels read them in the accumulator's precision: a launch argument has less.
        self._factors: tuple[NDArray[Any], Tensor] = (np.empty(0), torch.empty(0))
        self._report: FoldReport = FoldReport()
        self.step = 0
        # words that have left the values, but are still in them
        self._sent: tuple[Quantization, Tensor] | None = None
        # values, and what followed them, before words left both
        self._before: tuple[Tensor, Tensor] | None = None
        # words that were written last, and where they are on the host
        self._written: tuple[NDArray[np.int32], Tensor] | None = None
        # of the last fold: the gradient's weight in the values, the velocity it went into, its norm's limit
        self._folded: tuple[float, Tensor | None, float | None] = 1.0, None, None

    @property
    def num_elements(self) -> int:
        """n, the number of elements."""
        return self._layout.num_elements

    @property
    def dtype(self) -> np.dtype[Any]:
        """float64 or float32."""
        return np.dtype(np.float64 if self._values.dtype == torch.float64 else np.float32)

    @property
    def device(self) -> torch.device:
        """Where the memory is."""
        return self._values.device

    @property
    def report(self) -> FoldReport:
        """Of the last fold; reading its numbers may wait for the device."""
        return self._report

    @property
    def square_norm(self) -> float:
        """Sum of squares of what is held back now; see `Accumulator.square_norm`."""
        return float(to_host(self._journal.square_norm)[0])

    @property
    def companions(self) -> tuple[Tensor, ...]:
        """Tensors of n elements that are cleared with the values, or follow them; restored with them."""
        return self._companions

    def fold(
        self,
        gradient: Tensor | KeptTensor,
        *,
        decay: float = 1.0,
        momentum: float | None = None,
        nesterov: bool = False,
        masking: bool = True,
        keep_residual: bool = True,
        clip_norm: float | None = None,
        low_pass: float | None = None,
    ) -> FoldReport:
        """Values = decay * values + gradient, with what a feedback adds; see `Accumulator.fold`."""
        beside = momentum is not None or low_pass is not None
        velocity = self._companions[0] if beside and self._companions else None
        followed = velocity if low_pass is not None else None
        factors = checked_factors(
            self.dtype, decay * keep_residual, momentum, nesterov, velocity is not None, low_pass
        )
        weight = 1.0 if velocity is None else float(factors[2] + factors[3])
        self._folded = weight, velocity, clip_norm
        keep = isinstance(gradient, KeptTensor)
        gradient = checked_gradient(gradient.tensor if keep else gradient, self._values)
        with on_device(self.device):
            if keep_residual or followed is not None:
                self._settle()
            self._sent = self._written = self._before = None
            if clip_norm is not None:
                gradient = clip(gradient, clip_norm, keep=keep)
            flat = gradient.reshape(-1)  # a view where strides allow it
            norm_before = self._journal.norm_before(followed)
            report = self._kernels.fold(
                self._values,
                flat,
                self._selection.new_maxima(),
                self._layout,
                self._on_device(factors),
                norm_before,
                velocity,
                plain=factors[0] == 1.0,
                keep=keep,
            )
            if not keep and flat.data_ptr() != gradient.data_ptr():
                gradient.zero_()
            if followed is None:
                self._journal.restart(report[2:3], masking=masking)
            else:
                # the kernel takes the values for what was held back
                torch.mul(norm_before, float(factors[1]) ** 2, out=report[3:4])
                self._journal.restart(masking=masking, followed=followed)
            self._report = PendingReport(PendingCopy(report), self.step)
        return self._report

    def refuse(self) -> None:
        """Lets the report of the last fold say that this rank refuses the step; waits for the device."""
        report = self._report
        self._report = FoldReport(
            report.num_nonfinite,
            self.num_elements,
            report.square_norm,
            report.carried_square_norm,
            report.step,
        )

    def heal(self) -> None:
        """Lets the report of the last fold say that this rank is well; waits for the device."""
        report = self._report
        self._report = FoldReport(0, -1, report.square_norm, report.carried_square_norm, report.step)

    def _on_device(self, factors: NDArray[Any]) -> Tensor:
        if not np.array_equal(self._factors[0], factors):
            self._factors = factors, to_device(factors, self.device)
        return self._factors[1]

    def largest(self, num_selected: int, start: int = 0, stop: int | None = None) -> Indices:
        """Exactly the `num_selected` largest magnitudes in [start, stop); ties go to the lowest index."""
        with on_device(self.device):
            self._settle()
            return self._selection.largest(num_selected, start, stop)

    def kth_magnitude(self, k: int, start: int = 0, stop: int | None = None) -> float:
        """Exact k-th largest magnitude (k from 1) in [start, stop)."""
        with on_device(self.device):
            self._settle()
            return self._selection.kth_magnitude(k, start, stop)

    def at_least(self, threshold: float, start: int = 0, stop: int | None = None) -> Indices:
        """All positions in [start, stop) whose magnitude is >= threshold and not 0."""
        with on_device(self.device):
            self._settle()
            return self._selection.at_least(threshold, start, stop)

    def count_at_least(self, thresholds: Any) -> NDArray[np.int64]:
        """How many magnitudes are >= each threshold and not 0, for several thresholds."""
        with on_device(self.device):
            self._settle()
            return self._selection.count_at_least(thresholds)

    def moments(self, threshold: float = 0.0) -> Moments:
        """Moments of the magnitudes that are >= threshold and not 0, in one read."""
        with on_device(self.device):
            self._settle()
            return self._selection.moments(threshold)

    def sample_magnitudes(self, stride: int, offset: int = 0) -> Values:
        """Every stride-th magnitude from offset on."""
        with on_device(self.device):
            self._settle()
            return self._selection.sample_magnitudes(stride, offset)

    def take(self, indices: Indices) -> Values:
        """The values there, as a fresh array."""
        with on_device(self.device):
            self._settle()
            return to_host(self._values.index_select(0, self._places(indices)))

    def clear(self, indices: Indices) -> None:
        """Sets the values there, and (with masking) the companions', to 0; a companion may follow instead."""
        with on_device(self.device):
            self._settle()
            self._journal.clear(self._places(indices))

    def add(self, indices: Indices, values: Values) -> None:
        """Adds to the values there; what would not stay finite adds nothing. Indices are unique."""
        with on_device(self.device):
            self._settle()
            where = self._places(indices)
            new = np.ascontiguousarray(values, self.dtype).reshape(-1)
            if new.size != where.numel():
                raise ArgumentError("values", new.size, f"one for each of the {where.numel()} indices")
            added = to_device(new, self.device)
            fine = torch.isfinite(self._values.index_select(0, where) + added)
            if (followed := self._journal.followed) is not None:
                fine &= torch.isfinite(followed.index_select(0, where) + added)
            self._journal.add(where, torch.where(fine, added, 0.0))
            self._grew(where)

    def put(self, indices: Indices, values: Values) -> None:
        """Exactly these finite values there; companions stay, or follow. Indices are unique."""
        with on_device(self.device):
            self._settle()
            where = self._places(indices)
            new = np.ascontiguousarray(values, self.dtype).reshape(-1)
            if new.size != where.numel():
                raise ArgumentError("values", new.size, f"one for each of the {where.numel()} indices")
            self._journal.put(where, to_device(new, self.device))
            self._grew(where)

    def quantize(self, code: Quantization, key: int, words: NDArray[np.int32]) -> float:
        """Writes all values as codes of few bits; see `Accumulator.quantize`. In plain PyTorch."""
        with on_device(self.device):
            self._settle()
            written = quantize.encode(self._values, code, key)
            words[:] = to_host(written)
            self._written = words, written
            left = torch.empty_like(self._values)
            quantize.take_away(self._values, written, code, left)
            return float(to_host(sum_of_squares(left))[0])

    def subtract(self, code: Quantization, words: NDArray[np.int32], left: float | None = None) -> None:
        """What these words stand for leaves all values; see `Accumulator.subtract`."""
        with on_device(self.device):
            self._settle()
            known = self._written is not None and self._written[0] is words
            here = self._written[1] if known and self._written else to_device(words.copy(), self.device)
            followed = self._journal.followed
            if followed is None:
                self._sent = code, here
                self._journal.square_norm = sum_of_squares(self._less_sent(self._values))
                return
            # companions are at hand, so they have to be right at once
            self._before = self._values.clone(), followed.clone()
            for tensor in (self._values, followed):
                quantize.take_away(tensor, here, code, tensor)
            self._selection.maxima = None
            self._journal.settle(sum_of_squares(followed))

    def _settle(self) -> None:
        """Takes away what `subtract` was told: it cannot be abandoned any more."""
        if self._sent is not None:
            code, words = self._sent
            self._sent = None
            quantize.take_away(self._values, words, code, self._values)
            self._selection.maxima = None
            self._journal.settle(self._journal.square_norm)

    def _less_sent(self, tensor: Tensor) -> Tensor:
        """A tensor without what has left it; itself where nothing has."""
        if self._sent is None:
            return tensor
        left = torch.empty_like(tensor)
        quantize.take_away(tensor, self._sent[1], self._sent[0], left)
        return left

    def mask(self, indices: Indices) -> None:
        """Sets the companions there to 0, where there is masking; the values stay."""
        if self._companions:
            with on_device(self.device):
                self._journal.mask(self._places(indices))

    def _grew(self, where: Tensor) -> None:
        if self._selection.maxima is not None:
            self._kernels.raise_maxima(self._values, self._selection.maxima, self._layout, where)

    def _places(self, indices: Indices) -> Tensor:
        return to_device(checked(indices, self.num_elements), self.device)

    def abandon(self) -> None:
        """Takes back every change since the last fold, bit for bit."""
        with on_device(self.device):
            if self._sent is not None or self._before is not None:
                followed = self._journal.followed
                if self._before is not None and followed is not None:
                    self._values.copy_(self._before[0])
                    followed.copy_(self._before[1])
                    self._selection.maxima = None
                self._sent = self._before = None
                self._journal.take_norm_back()
            self._journal.abandon(self._selection.maxima, self._layout)

    def drop(self, gradient: KeptTensor) -> None:
        """Takes the last fold's gradient out again; see `Accumulator.drop`."""
        weight, velocity, clip_norm = self._folded
        step = checked_gradient(gradient.tensor, self._values)
        with on_device(self.device):
            if clip_norm is not None:
                step = clip(step, clip_norm, keep=True)
            step = step.reshape(-1).to(self._values.dtype)
            take_out(self._values, weight * step)
            if velocity is not None:
                take_out(velocity, step)
            self._selection.maxima = None
            self._journal.restart(followed=self._journal.followed)

    def values(self) -> Values:
        """All n values, to be read only: a view on the CPU, else a copy (use `assign` to change them)."""
        return _on_host(self._less_sent(self._values))

    def residual(self) -> Values:
        """What is held back, all n elements; see `Accumulator.residual`."""
        followed = self._journal.followed
        return _on_host(self._less_sent(self._values if followed is None else followed))

    def assign(self, values: Any) -> None:
        """Replaces all n values (loading a checkpoint). Companions are replaced after it, in place.

        Args:
            values: n elements of any float type, in any shape; an array, or a tensor on any device.

        Raises:
            ArgumentError: another number of elements, or NaN or Inf among them.
        """
        new = values.detach() if isinstance(values, torch.Tensor) else torch.from_numpy(np.array(values))
        if new.numel() != self.num_elements:
            raise ArgumentError("values", tuple(new.shape), f"an array of {self.num_elements} elements")
        new = new.to(self._values.dtype).reshape(-1)
        if not bool(torch.isfinite(new).all()):
            raise ArgumentError("values", "NaN or Inf", "finite numbers")
        self._values.copy_(new)
        self._sent = self._before = None
        self._selection.maxima = None
        self._journal.restart()


def _on_host(tensor: Tensor) -> Values:
    view = tensor.detach().cpu().numpy().view()
    view.flags.writeable = False
    return view
