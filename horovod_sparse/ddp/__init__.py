"""Sparsification behind torch.distributed: a communication hook of DistributedDataParallel. Needs no Horovod.

    model = DistributedDataParallel(net)
    sync = horovod_sparse.ddp.attach(model, "exdyna:density=0.001", optimizer=optimizer)

or, where hooks are registered by others, ``register_comm_hook(horovod_sparse.ddp.State(...),
horovod_sparse.ddp.hook)``.
"""

from horovod_sparse.ddp.local_steps import LocalSteps as LocalSteps
from horovod_sparse.ddp.synchronizer import State as State
from horovod_sparse.ddp.synchronizer import attach as attach
from horovod_sparse.ddp.synchronizer import hook as hook
from horovod_sparse.tensors.layout import redistribute as redistribute
