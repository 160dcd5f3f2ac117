"""PyTorch over torch.distributed: the hook of DistributedDataParallel."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from conformance.engine import RATE, SHAPES, Engine
from conformance.pytorch import TorchTraining
from horovod_sparse.merging import Plan
from support.replicas import Replica

__all__ = ["ENGINES"]

PLAN = Plan((("one", "second"), ("scalar", "bias"), ("first",)))
OF_MODEL = {"static_graph", "process_group", "find_unused_parameters", "gradient_as_bucket_view"}


class HookTraining(TorchTraining):
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
        arguments = dict.fromkeys(("find_unused_parameters", "gradient_as_bucket_view"), absent)
        arguments |= {name: options.pop(name) for name in OF_MODEL & set(options)}
        if members is not None:
            arguments["process_group"] = members
        has_rules = isinstance(compression, str) and "dens" in compression.partition(",")[2]
        plan = PLAN if shapes == SHAPES and not has_rules else None
        self.replica = Replica(
            shapes,
            compression,
            lr=RATE,
            plan=options.pop("merging", plan),
            dtype=getattr(torch, dtype),
            attached=options,
            **arguments,
        )

        self.net, self.loss, self.optimizer = self.replica.net, self.replica.model, self.replica.optimizer
        self.keeper = self.replica.sync

    @property
    def parts(self) -> Any:
        return self.replica.sync.sparse


def everyone(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


COMMON = "adopts", "saved", "types", "device", "levels", "nonfinite", "drift", "buckets", "scaler", "retries"
HAS = frozenset({*COMMON, "members", "absent", "plans"})
_ENGINE = functools.partial(Engine, rank=dist.get_rank(), size=dist.get_world_size(), everyone=everyone)
ENGINES = [
    _ENGINE("hook", HookTraining, HAS),
]
