"""The methods of `scripts/bench sync` behind torch.distributed: PyTorch's own hooks, and ours."""

from __future__ import annotations

import fcntl
import math
import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import horovod_sparse.torch as hvd
from benchmarks.common.wire import Round, rounds_of
from benchmarks.sync.methods import Method, Synthetic
from horovod_sparse import ddp

#: what Linux is asked for an interface's address (SIOCGIFADDR)
_ADDRESS_OF = 0x8915
#: goes behind the names of methods
SUFFIX = " (ddp)"


def start_torch_distributed() -> None:
    """Makes ranks of Horovod ranks of torch.distributed, over the same interface."""
    if dist.is_initialized():
        return
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    interfaces = [line.partition(":")[0].strip() for line in lines]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", next((name for name in interfaces if name != "lo"), "lo"))
    with socket.socket() as free:
        name = struct.pack("256s", os.environ["GLOO_SOCKET_IFNAME"].encode())
        free.bind((socket.inet_ntoa(fcntl.ioctl(free.fileno(), _ADDRESS_OF, name)[20:24]), 0))
        address = hvd.broadcast_object(free.getsockname(), name="torch.distributed")
    method = f"tcp://{address[0]}:{address[1]}"
    dist.init_process_group("gloo", init_method=method, rank=hvd.rank(), world_size=hvd.size())


def _sides(count: int) -> tuple[int, int]:
    """A matrix of so many elements, as square as it can be: PowerSGD sends the sum of its sides."""
    width = next(side for side in range(math.isqrt(count), 0, -1) if count % side == 0)
    return count // width, width


class DdpMethod(Method):
    """A synchronization without a backward pass: ours, or a communication hook of DistributedDataParallel.

    Args:
        name: in results.
        model: whose gradients are synchronized.
        text: a sparsifier, "dense", or "powersgd RANK".
    """

    num_warmup = 6

    def __init__(self, name: str, model: Synthetic, text: str) -> None:
        super().__init__(name, model)
        module = torch.nn.Module()
        for layer, size in model.layers:
            parameter = torch.nn.Parameter(torch.zeros(_sides(size)))
            module.register_parameter(layer.replace(".", "_"), parameter)
        self._sync: Any = None
        self._buckets: Any = ()
        self._num_bytes = 4 * model.flat.numel()
        self._places: dict[Any, torch.Tensor] = dict(zip(module.parameters(), model.views(), strict=True))
        if text != "dense" and not text.startswith("powersgd"):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            self._sync = ddp.attach(module, text, optimizer)
            return
        self._ddp = DistributedDataParallel(module, gradient_as_bucket_view=True, init_sync=False)
        if text == "dense":
            self._ddp.register_comm_hook(None, allreduce_hook)
        else:
            rank = int(text.split()[1])
            self._num_bytes = 4 * rank * sum(sum(_sides(size)) for _, size in model.layers)
            self._ddp.register_comm_hook(PowerSGDState(None, rank, start_powerSGD_iter=2), powerSGD_hook)
        self._buckets = self._ddp.reducer._get_zeros_like_grad_buckets()

    def prepare(self) -> None:
        super().prepare()
        if self._sync is not None:
            for parameter, given in self._places.items():
                parameter.grad = given.view_as(parameter).clone()
        for bucket in self._buckets:
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                gradient.copy_(self._places[parameter].view_as(gradient))

    def run(self) -> None:
        started = time.perf_counter()
        if self._sync is not None:
            self._sync.synchronize()
        for future in [self._ddp.reducer._run_comm_hook(bucket) for bucket in self._buckets]:
            future.wait()
        self.parts = {"exchange": time.perf_counter() - started}
        if self._sync is not None:
            last = self._sync.telemetry.last
            self.parts = {
                "fold": last.fold_seconds,
                "select": last.select_seconds,
                "exchange": max(0.0, last.wait_seconds - last.fold_seconds - last.select_seconds),
                "apply": last.apply_seconds,
            }

    def rounds(self) -> list[Round]:
        if self._sync is None:
            return [Round("AllReduce", self._num_bytes)]
        return [item for part in self._sync.parts for item in rounds_of(part)]

    def facts(self) -> dict[str, float]:
        if self._sync is None:
            return {"density_selected": 1.0, "density_union": 1.0}
        last = self._sync.telemetry.last
        return {"density_selected": last.density_selected, "density_union": last.density_union}
