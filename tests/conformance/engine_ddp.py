"""PyTorch over torch.distributed: the hook of DistributedDataParallel."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from conformance.engine import RATE, SHAPES, Engine
from horovod_sparse.merging import Plan
from support.replicas import Replica

__all__ = ["ENGINES"]

PLAN = Plan((("one", "second"), ("scalar", "bias"), ("first",)))
OF_MODEL = ("gradient_as_bucket_view", "static_graph", "find_unused_parameters", "process_group")


class HookTraining:
    """`horovod_sparse.ddp.attach`."""

    def __init__(
        self,
        compression: Any,
        shapes: Mapping[str, Any] = SHAPES,
        *,
        dtype: str = "float32",
        members: Any = None,
        absent: bool = False,
        **options: Any,
    ) -> None:
        arguments = {name: options.pop(name) for name in OF_MODEL if name in options}
        if members is not None:
            arguments["process_group"] = members
        has_rules = isinstance(compression, str) and "dense" in compression
        plan = PLAN if shapes == SHAPES and not has_rules else None
        self.replica = Replica(
            shapes,
            compression,
            lr=RATE,
            plan=plan,
            dtype=getattr(torch, dtype),
            attached=options,
            find_unused_parameters=absent,
            **arguments,
        )

    @property
    def optimizer(self) -> Any:
        return self.replica.optimizer

    @property
    def telemetry(self) -> Any:
        return self.replica.sync.telemetry

    @property
    def parts(self) -> Any:
        return self.replica.sync.sparse

    def steps(self) -> set[int]:
        return {part.bucket.state.step for part in self.parts}

    def step(self, gradients: Mapping[str, np.ndarray]) -> None:
        try:
            self.replica.model(gradients).backward()
            self.replica.optimizer.step()
        finally:
            self.replica.optimizer.zero_grad()

    def weights(self) -> dict[str, np.ndarray]:
        parameters = self.replica.net.named_parameters()
        return {name: one.detach().to(torch.float64, copy=True).numpy() for name, one in parameters}

    def held(self) -> dict[str, np.ndarray]:
        return {name: values.double().numpy() for name, values in self.replica.held().items()}

    def change(self, name: str) -> None:
        with torch.no_grad():
            self.replica.net.get_parameter(name).view(-1)[-1] += 1e-3

    def saved(self) -> Any:
        return copy.deepcopy((self.replica.net.state_dict(), self.replica.sync.state_dict()))

    def load(self, saved: Any) -> None:
        self.replica.net.load_state_dict(saved[0])
        self.load_state(saved)

    def load_state(self, saved: Any) -> None:
        self.replica.sync.load_state_dict(saved[1])


def everyone(value: Any) -> list[Any]:
    """Of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


COMMON = "adopts", "members", "saved", "absent", "types", "device", "levels", "nonfinite", "drift", "buckets"
HAS = frozenset({*COMMON, "retries"})
ENGINES = [Engine("hook", HookTraining, HAS, dist.get_rank(), dist.get_world_size(), everyone)]
