"""Measuring a cluster through PyTorch's driver: as a training's own requests are carried out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from horovod_sparse.arrays.protocol import Accumulator
from horovod_sparse.collectives import Request, Synchronization
from horovod_sparse.feedback import Recipe
from horovod_sparse.frontend.calibration import Where
from horovod_sparse.frontend.calibration.buckets import BucketMemory, HostBucketMemory
from horovod_sparse.frontend.engine import carry_out
from horovod_sparse.merging import ParameterFacts
from horovod_sparse.pytorch.memory import HOST_DEVICES, DeviceMemory
from horovod_sparse.sparsifiers import BucketInfo, SparseSum
from horovod_sparse.topology import Topology
from horovod_sparse.torch._horovod import hvd
from horovod_sparse.torch.driver import HorovodDriver

_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class Starts:
    """How long it took to start the last request: what a training's own thread does before it goes on."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def last_seconds(self) -> float:
        """For `calibration`."""
        return self._seconds

    def note(self, seconds: float) -> None:
        """A request was started."""
        self._seconds = seconds


def carry_out_together(
    coroutine: Synchronization[Any],
    process_set: Any,
    name: str,
    starts: Starts | None = None,
    deadline_seconds: float | None = None,
    meanwhile: Callable[[], None] | None = None,
    topology: Topology | None = None,
) -> Any:
    """Runs a coroutine to its end; all ranks of the process set do so together, and nothing else meanwhile.

    Every request of a type has the same name, as a bucket's has in every step: so Horovod's response cache
    knows it.

    Args:
        coroutine: yields requests.
        process_set: the ranks.
        name: of the collectives.
        starts: is told how long each start took.
        deadline_seconds: see `HorovodDriver`.
        meanwhile: see `Driver.wait`.
        topology: see `HorovodDriver`.
    """
    driver = HorovodDriver(process_set, deadline_seconds, by_pairs=False, topology=topology)

    def execute(request: Request) -> Any:
        started = time.perf_counter()
        task = driver.start(f"{name}.{type(request).__name__}", _alone(request))
        if starts is not None:
            starts.note(time.perf_counter() - started)
        driver.wait([task], meanwhile)
        return task.value()

    return carry_out(coroutine, execute)


def _alone(request: Request) -> Synchronization[Any]:
    return (yield request)


def where_of(process_set: Any, device: torch.device) -> Where:
    """This rank's place, and what a profile says of the cluster."""
    words = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Where.of(process_set, "torch", hvd, words)


def bucket_memory(parameters: Sequence[ParameterFacts]) -> tuple[BucketMemory, torch.device, str]:
    """Where most elements are, and of which type: what is measured stands for all."""
    elements: dict[tuple[str, str], int] = {}
    for parameter in parameters:
        key = parameter.device, parameter.dtype
        elements[key] = elements.get(key, 0) + parameter.num_elements
    name, dtype = max(elements, key=lambda key: elements[key])
    device = torch.device(name)
    on_host = device.type in HOST_DEVICES
    return HostBucketMemory() if on_host else DeviceBucketMemory(device), device, dtype


class DeviceBucketMemory:
    """Buckets on a device; implements `BucketMemory`. Every method waits for the device.

    Args:
        device: where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._memory = device, DeviceMemory(device)
        self._source: torch.Tensor | None = None

    def accumulator(self, info: BucketInfo, recipe: Recipe) -> Accumulator:
        """See `BucketMemory.accumulator`."""
        return self._memory.accumulator(info, recipe)

    def gradient(self, num_elements: int, dtype: str) -> torch.Tensor:
        """See `BucketMemory.gradient`."""
        generator = torch.Generator(self._device).manual_seed(1)
        drawn = torch.randn(num_elements, device=self._device, generator=generator)
        self._source = (drawn * drawn.abs()).to(_DTYPES[dtype])  # a heavy tail, as gradients have
        return torch.zeros_like(self._source)

    def refill(self, gradient: torch.Tensor) -> None:
        """See `BucketMemory.refill`."""
        if self._source is not None:
            gradient.copy_(self._source)
        self._wait(gradient)

    def apply(self, gradient: torch.Tensor, total: SparseSum, size: int) -> None:
        """See `BucketMemory.apply`."""
        self._memory.scatter(gradient, None if total.whole else total.indices, total.values, 1.0 / size)
        self._wait(gradient)

    def sum_dense(self, gradient: torch.Tensor, place: tuple[int, int]) -> Synchronization[None]:
        """See `BucketMemory.sum_dense`."""
        total = yield from self._memory.sum_dense("calibration", gradient, None, place)
        gradient.copy_(total * (1.0 / place[1]))
        self._wait(gradient)

    @staticmethod
    def _wait(gradient: torch.Tensor) -> None:
        gradient[:1].cpu()


class DenseTraining:
    """What PyTorch and Horovod do in a dense training; implements `TrainingWork`.

    Args:
        device: where parameters and gradients are.
        process_set: the ranks.
    """

    def __init__(self, device: torch.device, process_set: Any) -> None:
        self._device, self._process_set = device, process_set

    def update(self, num_elements: int) -> Callable[[], object]:
        """See `TrainingWork.update`."""
        parameter = torch.nn.Parameter(torch.zeros(num_elements, device=self._device))
        parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer = torch.optim.SGD([parameter], lr=0.01, momentum=0.9)

        def run() -> None:
            optimizer.step()
            self._wait(parameter)

        return run

    def sums(self, num_elements: int, pieces: int) -> Callable[[], Callable[[], object]]:
        """See `TrainingWork.sums`."""
        size = max(1, num_elements // pieces)
        tensors = [torch.ones(size, device=self._device) for _ in range(pieces)]

        def start() -> Callable[[], object]:
            handles = [
                hvd.allreduce_async_(
                    tensor, name=f"calibration.sum.{number}", op=hvd.Average, process_set=self._process_set
                )
                for number, tensor in enumerate(tensors)
            ]

            def finish() -> None:
                for handle in handles:
                    hvd.synchronize(handle)
                self._wait(tensors[-1])

            return finish

        return start

    @staticmethod
    def _wait(tensor: torch.Tensor) -> None:
        if tensor.device.type not in HOST_DEVICES:
            tensor.detach()[:1].cpu()
