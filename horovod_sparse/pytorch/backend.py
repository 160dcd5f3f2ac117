"""Which implementation of the primitives serves a device."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from horovod_sparse.kernels.layout import Layout
from horovod_sparse.pytorch import plain

_log = logging.getLogger("horovod_sparse")

# The one that comes with PyTorch 2.8; 3.3 does not compile all of the kernels.
_OLDEST_TRITON = (3, 4)


class TensorKernels(Protocol):
    """The primitives on tensors: what `plain` says they do, whoever does it."""

    def fold(
        self,
        values: Tensor,
        gradient: Tensor,
        maxima: Tensor,
        layout: Layout,
        factors: Tensor,
        square_norm: Tensor,
        velocity: Tensor | None = None,
        plain: bool = False,
        keep: bool = False,
    ) -> Tensor:
        """See `plain.fold`."""

    def scan_maxima(self, values: Tensor, maxima: Tensor, layout: Layout) -> None:
        """See `plain.scan_maxima`."""

    def refresh_maxima(self, values: Tensor, maxima: Tensor, layout: Layout, indices: Tensor) -> None:
        """See `plain.refresh_maxima`."""

    def raise_maxima(self, values: Tensor, maxima: Tensor, layout: Layout, indices: Tensor) -> None:
        """See `plain.raise_maxima`."""

    def at_least(
        self, values: Tensor, maxima: Tensor, layout: Layout, bits: int, start: int, stop: int, capacity: int
    ) -> tuple[Tensor, Tensor]:
        """See `plain.at_least`."""

    def kth(
        self, values: Tensor, maxima: Tensor, layout: Layout, k: int, start: int, stop: int, dense: bool
    ) -> Tensor:
        """See `plain.kth`."""

    def largest(
        self, values: Tensor, maxima: Tensor, layout: Layout, k: int, start: int, stop: int, dense: bool
    ) -> tuple[Tensor, Tensor]:
        """See `plain.largest`."""

    def count_at_least(
        self, values: Tensor, maxima: Tensor, layout: Layout, thresholds: Sequence[int]
    ) -> Tensor:
        """See `plain.count_at_least`."""

    def moments(self, values: Tensor, bits: int) -> Tensor:
        """See `plain.moments`."""

    def clear(self, values: Tensor, indices: Tensor) -> Tensor:
        """See `plain.clear`."""

    def put(self, values: Tensor, indices: Tensor, new: Tensor) -> None:
        """See `plain.put`."""

    def add(self, values: Tensor, indices: Tensor, new: Tensor) -> Tensor:
        """See `plain.add`."""

    def add_sum(self, dense: Tensor, indices: Tensor, new: Tensor, unique: bool) -> Tensor:
        """See `plain.add_sum`."""


def kernels_for(device: torch.device) -> TensorKernels:
    """The fastest implementation for a device: Triton for CUDA where it is installed, else plain PyTorch."""
    return _triton() if device.type == "cuda" else cast(TensorKernels, plain)


@functools.cache
def _triton() -> TensorKernels:
    try:
        import triton

        version = tuple(int(part) for part in triton.__version__.split(".")[:2])
        if version < _OLDEST_TRITON:
            raise ImportError(
                f"Triton {triton.__version__} is older than {'.'.join(map(str, _OLDEST_TRITON))}"
            )
        from horovod_sparse.pytorch import triton as triton_kernels
    except ImportError as error:
        _log.warning(
            "sparsifiers on CUDA use plain PyTorch, several times slower than their Triton kernels: %s", error
        )
        return cast(TensorKernels, plain)
    return cast(TensorKernels, triton_kernels)
