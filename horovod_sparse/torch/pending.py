"""A gradient between `compress` and `decompress`: what Horovod carries around as ctx."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass

import torch

from horovod_sparse.feedback import Bucket
from horovod_sparse.sparsifiers import SparseSum
from horovod_sparse.telemetry import BucketReport
from horovod_sparse.tensors.driver import Driver, Task
from horovod_sparse.tensors.memory import GradientMemory
from horovod_sparse.tensors.streams import CudaStreams
from horovod_sparse.torch.stock import StockOptimizer

#: elements of a gradient that are looked at to notice a change that PyTorch did not count
_NUM_PROBES = 16


def probes(gradient: torch.Tensor) -> torch.Tensor | None:
    """A few elements of a gradient; None where looking would make the host wait."""
    if gradient.device.type != "cpu" or not gradient.is_contiguous():
        return None
    return gradient.detach().view(-1)[:: max(1, gradient.numel() // _NUM_PROBES)].clone()


@dataclass(eq=False)
class PendingGradient:
    """What is needed to finish a synchronization.

    Attributes:
        name: of the parameter.
        gradient: as Horovod gave it.
        memory: where the gradient is.
        streams: in which the synchronization works, where there are several.
        learning_rate: of this step, where it is known.
        stock: the optimizer that asked for it, if one is known.
        parameter: whose gradient it is.
        loss_scale: by which the gradient is larger than it would be without a loss scaler.
        version: of the gradient, as PyTorch counts changes.
        address: of its memory.
        seen: a few of its elements.
        overflow: whether the step is given up, and a loss scaler finds out by a gradient of Inf.
        bucket: of the parameter, from `begin` on.
        task: the synchronization, from `begin` on.
    """

    name: str
    gradient: torch.Tensor
    memory: GradientMemory
    streams: CudaStreams | None
    learning_rate: float | None
    stock: StockOptimizer | None
    parameter: weakref.ref[torch.Tensor]
    loss_scale: float = 1.0
    version: int = 0
    address: int = 0
    seen: torch.Tensor | None = None
    overflow: bool = False
    bucket: Bucket | None = None
    task: Task | None = None

    def begin(self, bucket: Bucket, driver: Driver) -> None:
        """Folds the gradient into the parameter's bucket and starts its synchronization; does not wait."""
        self.bucket = bucket
        if self.streams is not None:
            self.streams.meet()  # before it is divided by the loss's scale
        foldable = self.memory.foldable(self.gradient, self.loss_scale)
        scale = 1.0 if self.stock is not None and self.stock.adds_up else None
        step = bucket.step(foldable, self.learning_rate, scale=scale)
        if self.streams is not None:
            step = self.streams.run(step)
        self.task = driver.start(f"sparse.{self.name}", step)

    def finish(self, factor: float) -> tuple[torch.Tensor, BucketReport]:
        """Writes the sum into the gradient; O(k)."""
        if self.bucket is None or self.task is None:
            raise RuntimeError("the synchronization has not begun: this is a bug, please report it")
        sum_: SparseSum = self.task.value()
        started = time.perf_counter()
        if self.streams is not None:
            self.streams.join()
        gradient = self.gradient
        if not gradient.is_contiguous():
            gradient = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
        scale = factor / self.bucket.info.size * self.loss_scale
        num_union = self.memory.write(gradient, None if sum_.whole else sum_.indices, sum_.values, scale)
        self.bucket.accept()
        report = BucketReport(
            step=self.bucket.last,
            num_union=num_union,
            dense_bytes=gradient.numel() * gradient.element_size(),
            norms=sum_.norms,
            wait_seconds=self.task.waited_seconds,
            apply_seconds=time.perf_counter() - started,
        )
        return gradient, report

    def abandon(self, *, drop: bool = False) -> None:
        """Returns the selection to the residual; with `drop` the gradient leaves it."""
        if self.bucket is not None:
            if self.streams is not None:
                self.streams.join()
            self.bucket.abandon(drop=drop)

    def give_up(self, *, drop: bool = False) -> None:
        """Returns the selection to the residual; the gradient is 0."""
        self.abandon(drop=drop)
        self.gradient.zero_()

    @property
    def edited(self) -> bool:
        """Whether the gradient was changed since `compress` was given it."""
        owner = self.parameter()
        if (owner is not None and owner.grad is not self.gradient) or self.gradient._version != self.version:
            return True
        seen = probes(self.gradient)
        if seen is None or self.seen is None or self.gradient.data_ptr() != self.address:
            return False  # model.half() and model.float() move memory, and round
        return not torch.equal(seen.isfinite(), self.seen.isfinite()) or not torch.equal(
            seen.nan_to_num(), self.seen.nan_to_num()
        )
