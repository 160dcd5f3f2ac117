"""Sparsification behind torch.distributed: hooks of DistributedDataParallel and FSDP2. Needs no Horovod.

`attach` does it; where others register hooks, ``register_comm_hook(State(...), hook)``.
"""

from horovod_sparse.ddp.local_steps import LocalSteps as LocalSteps
from horovod_sparse.ddp.synchronizer import State as State
from horovod_sparse.ddp.synchronizer import attach as attach
from horovod_sparse.ddp.synchronizer import hook as hook
from horovod_sparse.tensors.layout import redistribute as redistribute
from horovod_sparse.training.local_settings import OuterStep as OuterStep
