"""What calibration measures of PyTorch over Horovod: a dense training, and the first steps of any."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from horovod_sparse.planning.request import Decision
from horovod_sparse.planning.warmup import Decide
from horovod_sparse.plans.plan import ParameterFacts
from horovod_sparse.tensors.flat_gradient import HOST_DEVICES
from horovod_sparse.tensors.measuring import Stamped, bucket_memory
from horovod_sparse.topology import Topology
from horovod_sparse.torch._horovod import hvd
from horovod_sparse.torch.driver import carry_out_together
from horovod_sparse.torch.horovod_engine import most_of, where_of


class DenseTraining:
    """What PyTorch and Horovod do in a dense training; implements `TrainingWork`."""

    def __init__(self, device: torch.device, process_set: Any) -> None:
        self._device, self._process_set = device, process_set

    def update(self, num_elements: int) -> Callable[[], object]:
        parameter = torch.nn.Parameter(torch.zeros(num_elements, device=self._device))
        parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer = torch.optim.SGD([parameter], lr=0.01, momentum=0.9)

        def run() -> None:
            optimizer.step()
            self._wait(parameter)

        return run

    def sums(self, num_elements: int, pieces: int) -> Callable[[], Callable[[], object]]:
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


class HorovodMeasuring(Stamped):
    """Measures by PyTorch's stamps, and decides over Horovod; implements `planning.warmup.Measuring`."""

    def __init__(self, parameters: Sequence[ParameterFacts], process_set: Any) -> None:
        super().__init__(parameters)
        self._process_set = process_set

    @property
    def rank(self) -> int:
        return int(self._process_set.rank())

    def decided(
        self, parameters: Sequence[ParameterFacts], topology: Topology | None, decide: Decide
    ) -> Decision:
        device, dtype = most_of(parameters)
        cluster = dataclasses.replace(where_of(self._process_set, device), topology=topology)
        starts, name = [0.0], "horovod_sparse.planning"
        coroutine = decide(
            cluster, memory=bucket_memory(device), dtype=dtype, starting_seconds=lambda: starts[-1]
        )
        with torch.no_grad():
            decision: Decision = carry_out_together(
                coroutine, self._process_set, name, starts.append, topology=topology
            )
        return decision
