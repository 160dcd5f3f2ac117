"""Sparsification behind torch.distributed: for DistributedDataParallel, FSDP2, and plain modules.

Needs no Horovod. `attach` does it.
"""

from typing import NoReturn

from horovod_sparse.ddp.attach import attach as attach
from horovod_sparse.ddp.local_steps import LocalSteps as LocalSteps
from horovod_sparse.tensors.layout import redistribute as redistribute
from horovod_sparse.training.schedules import OuterStep as OuterStep


def __getattr__(name: str) -> NoReturn:
    if name in ("State", "hook"):
        raise AttributeError(
            f"horovod_sparse.ddp has no {name} any more: leave register_comm_hook out, and write "
            "attach(model, compression, optimizer)"
        )
    raise AttributeError(f"module 'horovod_sparse.ddp' has no attribute {name!r}")
