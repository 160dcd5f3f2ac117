"""A gradient between `compress` and `decompress`: what Horovod carries around as ctx."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from horovod_sparse.feedback import Bucket
from horovod_sparse.sparsifiers import SparseSum
from horovod_sparse.telemetry import BucketReport
from horovod_sparse.torch.driver import Task
from horovod_sparse.torch.memory import GradientMemory
from horovod_sparse.torch.stock import StockOptimizer
from horovod_sparse.torch.streams import Streams

__all__ = ["PendingGradient"]


@dataclass(eq=False)
class PendingGradient:
    """What is needed to finish a synchronization.

    Attributes:
        name: of the parameter.
        bucket: of the parameter.
        gradient: as Horovod gave it.
        memory: where the gradient is.
        streams: in which the synchronization works.
        task: the synchronization.
        stock: the optimizer that asked for it, if one is known.
    """

    name: str
    bucket: Bucket
    gradient: torch.Tensor
    memory: GradientMemory
    streams: Streams
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
        self.streams.join()
        gradient = self.gradient
        if gradient.is_contiguous():
            gradient.zero_()
        else:
            gradient = torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device)
        scale = factor / self.bucket.info.size
        num_union = self.memory.scatter(gradient, sum_.indices, sum_.values, scale)
        report = BucketReport(
            step=self.bucket.last,
            num_union=num_union,
            dense_bytes=gradient.numel() * gradient.element_size(),
            norms=sum_.norms,
            wait_seconds=self.task.waited_seconds,
            apply_seconds=time.perf_counter() - started,
        )
        return gradient, report

    def abandon(self) -> None:
        """Returns the selection to the residual."""
        self.streams.join()
        self.bucket.abandon()

    def give_up(self) -> None:
        """Returns the selection to the residual; the gradient is 0."""
        self.abandon()
        self.gradient.zero_()
