"""Front end for torch.distributed: DistributedDataParallel, FSDP2 and plain modules.

Needs no Horovod. `attach` does it.
"""

from horovod_sparse.ddp.attach import attach as attach
from horovod_sparse.ddp.steps import LocalSteps as LocalSteps
from horovod_sparse.tensors.checkpoint import load as load
from horovod_sparse.tensors.checkpoint import save as save
from horovod_sparse.tensors.layout import redistribute as redistribute
from horovod_sparse.training.schedules import OuterStep as OuterStep
