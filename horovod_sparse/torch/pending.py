"""A gradient between `compress` and `decompress`: what Horovod carries around as ctx."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from horovod_sparse.arrays import apply_scaled_sum
from horovod_sparse.feedback import Bucket
from horovod_sparse.sparsifiers import SparseSum
from horovod_sparse.telemetry import BucketReport
from horovod_sparse.torch.driver import Task
from horovod_sparse.torch.stock import StockOptimizer
from horovod_sparse.torch.tensors import host_view

__all__ = ["PendingGradient"]


@dataclass(eq=False)
class PendingGradient:
    """What is needed to finish a synchronization.

    Attributes:
        name: of the parameter.
        bucket: of the parameter.
        gradient: as Horovod gave it; zeros since it was folded.
        task: the synchronization.
        stock: the optimizer that asked for it, if one is known.
    """

    name: str
    bucket: Bucket
    gradient: torch.Tensor
    task: Task
    stock: StockOptimizer | None

    def finish(self, factor: float) -> tuple[torch.Tensor, BucketReport]:
        """Writes the sum into the gradient; O(k).

        Args:
            factor: what Horovod has made of 1, summed over ranks: P for a sum, 1 for an average.

        Returns:
            The gradient (a fresh one if it was not contiguous), and what happened to it.
        """
        sum_: SparseSum = self.task.value()
        started = time.perf_counter()
        gradient, num_union = _write(self.gradient, sum_, factor / self.bucket.info.size)
        report = BucketReport(
            step=self.bucket.last,
            num_union=num_union,
            dense_bytes=gradient.numel() * gradient.element_size(),
            norms=sum_.norms,
            wait_seconds=self.task.waited_seconds,
            apply_seconds=time.perf_counter() - started,
        )
        return gradient, report

    def give_up(self) -> None:
        """Returns the selection to the residual; the gradient is 0."""
        self.bucket.abandon()
        self.gradient.zero_()


def _write(gradient: torch.Tensor, sum_: SparseSum, scale: float) -> tuple[torch.Tensor, int]:
    """The gradient with the scaled sum in it, and the size of the union."""
    if not gradient.is_contiguous():
        gradient = torch.zeros(gradient.shape, dtype=gradient.dtype)
    return gradient, apply_scaled_sum(host_view(gradient), sum_.indices, sum_.values, scale)
